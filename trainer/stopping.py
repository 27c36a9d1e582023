"""Ending early: the flag that workers look at, and what SIGINT and SIGTERM do.

While a run trains they only set the flag: the first asks the workers to stop at the next step boundary, where they
save; a second one leaves at once. Nothing here loads torch, because the command line needs it before that.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class Stop:
    """Why and whether a run should end; readable from every thread."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.signal: int | None = None

    def request(self) -> None:
        """Ask every worker to end at its next step boundary."""
        self._event.set()

    def requested(self) -> bool:
        """Whether somebody asked."""
        return self._event.is_set()


def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    """Signal handler for when there is nothing to save: end the way Ctrl-C does, remembering which signal it was."""
    raise KeyboardInterrupt(number)


def exit_status(interrupted: KeyboardInterrupt) -> int:
    """The exit status that belongs to an interrupt: 128 plus the signal's number."""
    return 128 + (interrupted.args[0] if interrupted.args else signal.SIGINT)


@contextmanager
def stop_on_signals(stop: Stop, announce: Callable[[str], None]) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into a stop request while the context lasts; a second one exits at once."""

    def handle(number: int, _frame: FrameType | None) -> None:
        if stop.signal is not None:
            os._exit(128 + number)
        stop.signal = number
        stop.request()
        announce(f"{signal.Signals(number).name}: finishing this step and saving; once more to leave at once")

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
