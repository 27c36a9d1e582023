"""What a run is on its way to W&B: its rows, how far they have come, and what it and its writer are called there."""

import uuid
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from shared.redaction import without_secrets
from shared.wire import Hello, Scalar

STEP_AXIS = "train/step"
TIME_AXIS = "time/elapsed_s"
RECORD_KEY = "_record"
"""Key of a row that says which record it came from, as SESSION:SEQ; W&B hides keys that begin so."""
Row = dict[str, Scalar]


class Cursor(NamedTuple):
    """How far a session's records have become rows: the last one, and the time of the last telemetry row."""

    seq: int = -1
    last_telemetry_time_s: float = float("-inf")


class SessionProgress(NamedTuple):
    """The last record of a session that became a row, and whether there will be more."""

    seq: int
    has_ended: bool


class SpooledRun(msgspec.Struct, frozen=True, kw_only=True):
    """What the spool knows of a run. `exit_code` is there once every session of it has ended."""

    run_id: str
    num_rows: int
    num_sent: int
    """Rows handed to wandb."""
    base_step: int | None
    num_confirmed: int
    """Rows that the server was seen to have."""
    num_lines: int
    """All rows that the server was seen to have of this run, those of others included."""
    exit_code: int | None
    closed: bool

    @property
    def num_waiting(self) -> int:
        """Rows that were not yet handed to W&B."""
        return max(self.num_rows - self.num_sent, 0)

    @property
    def num_unconfirmed(self) -> int:
        """Rows that the server was not yet seen to have."""
        return max(self.num_rows - self.num_confirmed, 0)


def owner_name(path: Path) -> str:
    """What the spool at a path calls itself on the server: kept beside it, so that it outlives a damaged spool.

    It has the number of its own file in it, so that a copied state directory calls itself otherwise.
    """
    id_path = path.with_suffix(".id")
    name = uuid.uuid4().hex[:12]
    with suppress(OSError):
        if not id_path.exists():
            id_path.write_text(name)
        name = f"{id_path.read_text()}-{id_path.stat().st_ino:x}"
    return name


def run_config(hello: Hello) -> dict[str, object]:
    """What W&B gets as the configuration of a run: the trainer's own and the topology, nothing that smells secret."""
    config: dict[str, object] = dict(without_secrets(hello.config))
    config["topology"] = [msgspec.structs.asdict(device) for device in hello.topology]
    return config
