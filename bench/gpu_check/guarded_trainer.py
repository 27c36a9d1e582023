"""A training run whose waits for a GPU are written down: `python -m bench.gpu_check.guarded_trainer REPORT OPTION...`.

The options are those of `dflash-train`. Before the run a thread of its own waits for the GPU on purpose: a watch that
does not notice that notices nothing.
"""

import os
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from bench.gpu_check.sync_watch import Synchronisation, SyncWatch
from trainer.app import main as train
from trainer.app import prepare_allocator

CONTROL_THREAD = "control"


class GuardReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of a run. `expandable_bytes` of `reserved_bytes` lie in segments that grow."""

    synchronisations: tuple[Synchronisation, ...]
    is_guarded: bool
    """Whether there was a GPU to wait for."""
    reserved_bytes: int = 0
    expandable_bytes: int = 0


def main(report: str, *options: str) -> int:
    """Train; returns the exit status of the run."""
    prepare_allocator(os.environ)  # as the command does, before torch is loaded
    import torch  # noqa: PLC0415

    guards = torch.cuda.is_available()
    watch = SyncWatch(torch.cuda.set_sync_debug_mode if guards else lambda _mode: None)
    with watch:
        if guards:
            _wait_on_purpose(torch)
        status = train(options)
    segments = torch.cuda.memory_snapshot() if guards else []  # type: ignore[no-untyped-call]  # torch leaves it so
    written = GuardReport(
        synchronisations=tuple(watch.found),
        is_guarded=guards,
        reserved_bytes=sum(segment["total_size"] for segment in segments),
        expandable_bytes=sum(segment["total_size"] for segment in segments if segment["is_expandable"]),
    )
    Path(report).write_bytes(msgspec.json.encode(written))
    return status


def _wait_on_purpose(torch: Any) -> None:  # noqa: ANN401 - the module, loaded late
    thread = threading.Thread(target=lambda: torch.ones(1, device="cuda").item(), name=CONTROL_THREAD)
    thread.start()
    thread.join()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
