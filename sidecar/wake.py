"""Wake a sleeping main loop, from a signal handler or from any thread."""

import os
import select

_PIPE_BYTES = 1 << 20
"""More than a pipe holds: one read takes every ring."""


class Alarm:
    """A sleep that `ring` ends early. A pipe, because that is all a signal handler may safely touch."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def ring(self) -> None:
        """End the current sleep, or the next one."""
        try:
            os.write(self._writer, b"\0")
        except BlockingIOError:
            return  # the pipe is full: it rings already

    def sleep(self, timeout_s: float) -> None:
        """Sleep until the timeout or the next ring."""
        if select.select([self._reader], [], [], max(timeout_s, 0.0))[0]:
            os.read(self._reader, _PIPE_BYTES)

    def close(self) -> None:
        """Give the pipe back."""
        os.close(self._reader)
        os.close(self._writer)
