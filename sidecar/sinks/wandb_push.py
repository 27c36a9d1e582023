"""Uploads a spool from the command line, on this or another machine, and ends when everything is there."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from sidecar.sinks.wandb_settings import WandbSettings
from sidecar.sinks.wandb_supervisor import WandbSupervisor

MAX_FAILURES = 5
_TICK_S = 0.1


def push(spool_path: Path, settings: WandbSettings, environ: Mapping[str, str], say: Callable[[str], None]) -> int:
    """Send every row that W&B lacks and close the runs that are over; returns the exit code.

    Args:
        spool_path: the spool; no sidecar may be using it.
        settings: as for the daemon, whatever its mode.
        environ: where credentials come from.
        say: takes a line for the user.
    """
    if not spool_path.exists():
        say(f"{spool_path}: no such spool; give the sidecar's state directory with --state-dir")
        return 1
    supervisor = WandbSupervisor(
        spool_path, msgspec.structs.replace(settings, mode="online", until_drained=True), environ
    )
    told, num_failures = "", 0
    try:
        while True:
            supervisor.tick(time.monotonic())
            state = supervisor.state()
            line = f"{state.state}: {state.lag_records} rows left" + (f" ({state.detail})" if state.detail else "")
            if line != told:
                say(line)
                num_failures += state.state == "waiting"
                told = line
            if state.state == "idle":
                return 0
            if state.state in {"no-credentials", "refused", "conflict"} or num_failures >= MAX_FAILURES:
                return 1
            time.sleep(_TICK_S)
    finally:
        supervisor.close()
