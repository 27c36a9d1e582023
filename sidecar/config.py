"""Settings of the sidecar and where they come from.

Precedence as everywhere (`shared.settings`): command line, DFLASH_ environment, file, default. Two places are not
settings but follow from the machine: the state directory, chosen here when none is given, and the directory of the
trainers' endpoints, which both sides take from DFLASH_RUNTIME_DIR (`shared.endpoint`).
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.remote import check_remote
from shared.settings import SettingsError, assignments_layer, environment_layer, resolve, toml_layer

SYSTEM_STATE_DIR = Path("/var/lib/dflash-sidecar")
DEFAULT_LISTEN = "127.0.0.1:9477"
_MAX_PORT = 65_535


class JournalConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the past is kept."""

    max_age_s: Annotated[float, Meta(gt=0, description="Records older than this are dropped (s).")] = 7 * 86_400.0
    max_bytes: Annotated[int, Meta(ge=1_000_000, description="Oldest records are dropped above this (bytes).")] = 2**31


class WandbConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where rows go."""

    mode: Annotated[
        Literal["online", "offline", "off"],
        Meta(description="online uploads; offline keeps rows in the spool until `push`; off makes no rows."),
    ] = "online"
    project: Annotated[str, Meta(min_length=1, description="W&B project.")] = "dflash"
    entity: Annotated[str, Meta(description="W&B entity; empty takes the account's own.")] = ""
    interval_s: Annotated[float, Meta(gt=0, description="Time between telemetry rows (s).")] = 15.0
    transmit_interval_s: Annotated[int, Meta(ge=1, description="Time between uploads (s).")] = 15
    takeover_s: Annotated[
        float, Meta(ge=4, description="How long another sidecar must not have written a run to be taken for gone (s).")
    ] = 90.0


class CollectorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How often this machine is looked at."""

    interval_s: Annotated[float, Meta(ge=0.1, description="Time between readings of host, process and GPU (s).")] = 5.0
    deadline_s: Annotated[float, Meta(gt=0, description="A reading that takes longer counts as failed (s).")] = 5.0
    gpu_probe_s: Annotated[
        float, Meta(gt=0, description="Time between attempts to find a missing driver, a lost or a new GPU (s).")
    ] = 30.0


class RemoteConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Trainers on other machines."""

    endpoints: Annotated[
        tuple[str, ...], Meta(description='telemetry.endpoint of each trainer elsewhere: ["tcp://HOST:PORT"].')
    ] = ()
    keys: Annotated[str, Meta(description="Directory sidecar/ of the keys that `dflash-sidecar keys DIR` made.")] = ""


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How /metrics and the API are protected when `listen` is open to other machines."""

    tls_cert: Annotated[str, Meta(description="Certificate in PEM, its chain after it; with it HTTP is HTTPS.")] = ""
    tls_key: Annotated[str, Meta(description="Private key of the certificate in PEM, without a passphrase.")] = ""
    allow_public: Annotated[
        bool, Meta(description="Listen also where other machines can reach it, in the clear, for anybody to read.")
    ] = False


class SidecarConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be set."""

    state_dir: Annotated[
        str,
        Meta(
            description="Directory of journal, spool and log; by default $STATE_DIRECTORY, else "
            "/var/lib/dflash-sidecar if writable, else $XDG_STATE_HOME/dflash-sidecar."
        ),
    ] = ""
    listen: Annotated[str, Meta(description="HOST:PORT of /metrics and the API; port 0 takes a free one.")] = (
        DEFAULT_LISTEN
    )
    definitions: Annotated[
        str,
        Meta(description="Metric definitions; by default STATE_DIR/metrics.toml if it exists, else the shipped ones."),
    ] = ""
    interval_s: Annotated[float, Meta(ge=0.1, le=10.0, description="Time between evaluations (s).")] = 0.5
    journal: JournalConfig = JournalConfig()
    wandb: WandbConfig = WandbConfig()
    collectors: CollectorConfig = CollectorConfig()
    http: HttpConfig = HttpConfig()
    remote: RemoteConfig = RemoteConfig()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to listen on."""
        return parse_address(self.listen)


def load_config(
    flags: Mapping[str, str], assignments: Sequence[str], file: str | None, environ: Mapping[str, str]
) -> SidecarConfig:
    """Merge all layers and check them; raises SettingsError.

    Args:
        flags: dotted key to text, of those command-line options that were given.
        assignments: `key=value` of each --set.
        file: TOML file given with --config.
        environ: the process environment.
    """
    layers = [
        assignments_layer([f"{key}={value}" for key, value in flags.items()], "command line"),
        assignments_layer(assignments),
        environment_layer(SidecarConfig, environ),
        *([toml_layer(Path(file))] if file else []),
    ]
    config = resolve(SidecarConfig, layers)
    parse_address(config.listen)
    for endpoint in config.remote.endpoints:
        check_remote("remote.endpoints", endpoint, "remote.keys", config.remote.keys)
    if bool(config.http.tls_cert) != bool(config.http.tls_key):
        missing = "http.tls_key" if config.http.tls_cert else "http.tls_cert"
        raise SettingsError(f"{missing} is not set: TLS needs both, a certificate and its key")
    return config


def parse_address(listen: str) -> tuple[str, int]:
    """Split HOST:PORT, [IPv6]:PORT included; raises SettingsError."""
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > _MAX_PORT:
        raise SettingsError(f"listen={listen!r}: expected HOST:PORT, for example {DEFAULT_LISTEN}")
    return host, int(port)


def state_dir(config: SidecarConfig, environ: Mapping[str, str]) -> Path:
    """The state directory: as set, else systemd's, else the system one if writable, else the user's."""
    if chosen := config.state_dir or environ.get("STATE_DIRECTORY", "").split(":")[0]:
        return Path(chosen)
    if SYSTEM_STATE_DIR.is_dir() and os.access(SYSTEM_STATE_DIR, os.W_OK):
        return SYSTEM_STATE_DIR
    home = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME") or "~").expanduser() / ".local/state")
    return Path(home) / "dflash-sidecar"
