"""Lets any number of threads call the driver, and one alone when it is to be shut down.

`nvmlShutdown` under a call that is in progress is undefined, and a call that was cut off has frozen GPUs. So every
call is made inside the gate, and whoever shuts down closes it first, which fails while a call does not return.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

WAIT_S = 2.0
"""How long a reading waits while the driver is initialised anew."""


class GateClosedError(Exception):
    """The driver is not to be called now."""


class CallGate:
    """Closed at first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_open = False
        self._num_inside = 0
        self.generation = 0
        """Handles are good for one generation, from one opening to the next."""

    @contextmanager
    def calls(self, wait_s: float = WAIT_S) -> Iterator[None]:
        """Make calls inside; raises GateClosedError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_open, wait_s):
                raise GateClosedError("the driver is not initialised")
            self._num_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    def open(self) -> None:
        """Let callers in, after a successful initialisation."""
        with self._changed:
            self.generation += 1
            self._is_open = True
            self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Let nobody in and wait for those inside; when they do not come out in time it stays open, and False."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            was_open, self._is_open = self._is_open, False
            if self._changed.wait_for(lambda: not self._num_inside, max(deadline_s - time.monotonic(), 0.0)):
                return True
            self._is_open = was_open
            self._changed.notify_all()
            return False
