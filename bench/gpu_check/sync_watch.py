"""Notices every time that a thread waits for a GPU, with the thread and the place in our code.

PyTorch's sync-debug mode is one switch for the whole process. Set to raise, it would also hit those who may wait, such
as a target worker that brings hidden states to the host. So it is set to warn, and each warning is put down to the
thread in which it comes. What an autograd thread meets is warned of in the thread that called `backward`.
"""

import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from shared.wire import Record, Step

WARNING = "called a synchronizing CUDA operation"
ROOT = Path(__file__).parents[2]
OWN_PACKAGES = ("trainer", "shared")
WARM_UP_STEPS = 5
"""In its first steps a run may wait: kernels are compiled, optimizer state is made."""
NEVER_WAITING = ("drafter", "telemetry")
"""How the names of threads begin that must not."""


class Synchronisation(msgspec.Struct, frozen=True, kw_only=True):
    """One wait for a GPU; `place` is the innermost line of our own code."""

    thread: str
    place: str
    time_s: float


class SyncWatch:
    """Watches while it is entered, in all threads.

    Args:
        set_mode: `torch.cuda.set_sync_debug_mode`, or what stands for it.
    """

    def __init__(self, set_mode: Callable[[str], None]) -> None:
        self._set_mode = set_mode
        self._kept = warnings.catch_warnings()
        self._show_others: Callable[..., Any] = warnings.showwarning
        self.found: list[Synchronisation] = []

    def __enter__(self) -> Self:
        self._kept.__enter__()
        self._set_mode("warn")  # first: it warns of itself
        self._show_others = warnings.showwarning
        warnings.filterwarnings("always", message=f".*{WARNING}")
        warnings.showwarning = self._show
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._set_mode("default")
        self._kept.__exit__(kind, error, trace)

    def _show(self, message: Warning | str, *rest: Any, **named: Any) -> None:  # noqa: ANN401 - as warnings has it
        if WARNING not in str(message):
            self._show_others(message, *rest, **named)
            return
        thread = threading.current_thread().name
        self.found.append(Synchronisation(thread=thread, place=_place(), time_s=time.time()))


def step_times_s(audit: Path) -> list[float]:
    """When the steps of a run ended, by the trainer's own account (`telemetry.audit_path`); Unix time."""
    records = [msgspec.json.decode(line, type=Record) for line in audit.read_bytes().splitlines()]
    return [record.time_s for record in records if isinstance(record, Step)]


def on_step_path(found: Sequence[Synchronisation], times_s: Sequence[float]) -> list[Synchronisation]:
    """Those between the warm-up and the last step, in threads that must never wait."""
    if len(times_s) <= WARM_UP_STEPS:
        return []
    start_s, end_s = times_s[WARM_UP_STEPS - 1], times_s[-1]
    return [one for one in found if one.thread.startswith(NEVER_WAITING) and start_s < one.time_s <= end_s]


def _place() -> str:
    """Found without reading any source: it is called in the middle of a step."""
    stack = [(Path(frame.f_code.co_filename), line, frame.f_code.co_name) for frame, line in traceback.walk_stack(None)]
    stack = [entry for entry in stack if str(entry[0]) not in {__file__, warnings.__file__}]
    path, line, function = next((entry for entry in stack if _is_own(entry[0])), stack[0])
    return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{line} in {function}"


def _is_own(path: Path) -> bool:
    return any(path.is_relative_to(ROOT / package) for package in OWN_PACKAGES)
