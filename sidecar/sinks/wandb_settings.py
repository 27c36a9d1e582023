"""How the W&B sink is set up: its settings, where credentials come from, and what the uploading child may see.

The API key goes to the child in its environment and nowhere else: not in an argument, which every user of the machine
can read, and not in a log.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from sidecar.sinks.wandb_secrets import CREDENTIAL_NAME, api_key

NO_CREDENTIALS = (
    f"rows wait in the spool: set WANDB_API_KEY, or the systemd credential {CREDENTIAL_NAME}, or run `wandb login`"
)
_PASSED_ON = (
    "WANDB_API_KEY",
    "WANDB_BASE_URL",
    "WANDB_CONFIG_DIR",
    "WANDB_HTTP_TIMEOUT",
    "WANDB_IDENTITY_TOKEN_FILE",
    "WANDB_INSECURE_DISABLE_SSL",
    "WANDB_X_EXTRA_HTTP_HEADERS",
)


class WandbSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the sink. Whole seconds for the transmit interval: wandb cuts off the rest, and 0 means 15."""

    mode: Literal["online", "offline", "off"] = "online"
    project: str = "dflash"
    entity: str = ""
    transmit_interval_s: int = 15
    rows_per_second: float = 500.0
    init_timeout_s: float = 60.0
    finish_timeout_s: float = 8.0
    hang_timeout_s: float = 120.0
    """A child that has said nothing for so long is killed; longer than both timeouts above."""
    look_interval_s: float = 20.0
    """How often a child asks the server what it has of the run."""
    look_timeout_s: float = 10.0
    lease_s: float = 45.0
    """A child that could not ask for so long leaves, because another sidecar may have taken the run over."""
    quiet_s: float = 90.0
    """How long a run must not have changed before it is taken over from another spool; longer than the lease and all
    timeouts of a look and of sending."""
    stall_s: float = 180.0
    """A child is replaced when the server answers, but has taken none of the rows that wait for so long."""
    slice_s: float = 30.0
    """How long one run's child may go on while another run has rows to send."""
    max_life_s: float = 3600.0
    max_rows: int = 100_000
    """After this time or number of rows a child is replaced: wandb's files go, and the server says what it has."""
    min_backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    refused_backoff_s: float = 300.0
    until_drained: bool = False
    """Stop when the spool is empty, although a run is not over."""


def has_credentials(environ: Mapping[str, str]) -> bool:
    """Whether wandb will find a key: in the environment, a systemd credential, or netrc."""
    return bool(environ.get("WANDB_IDENTITY_TOKEN_FILE") or api_key(environ))


def child_environment(environ: Mapping[str, str], directory: Path) -> dict[str, str]:
    """What the uploading child gets: our environment without any other run's W&B variables, and the key."""
    child = {key: value for key, value in environ.items() if not key.startswith("WANDB_") or key in _PASSED_ON}
    if key := api_key(environ):
        child["WANDB_API_KEY"] = key
    cache = str(directory / "cache")
    quiet = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    return child | quiet | {"WANDB_CACHE_DIR": cache, "WANDB_DATA_DIR": cache}
