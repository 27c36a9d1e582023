"""The log on stderr, written by a thread of its own: whoever logs never waits for whoever reads.

stderr may be a pipe or a terminal that nobody reads, and a write to it then hangs. So lines wait in a bounded queue;
those that find no room are counted, and the count is told where they would have stood. The thread writes past
`sys.stderr` and outside of any lock of `logging`, because both are taken once more when Python ends.

With a file, stderr and stdout become that file, and a new one takes its place when it is large: the one before is kept.
"""

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

MAX_WAITING_LINES = 1_000
MAX_FILE_BYTES = 10 * 1024**2
STOP_S = 1.0
"""How long an orderly end waits for the reader to take the last lines."""
_STDOUT, _STDERR = 1, 2
_log = logging.getLogger(__name__)


class LogError(ValueError):
    """A file that cannot be logged to; the message is meant for the user."""


@contextlib.contextmanager
def log_to_stderr(file: Path | None = None) -> Iterator[None]:
    """Log one line per event, what threads die of included, until the end of the context.

    Args:
        file: becomes stderr and stdout of this process and of those it starts.

    Raises:
        LogError: the file cannot be written.
    """
    timed = "" if "JOURNAL_STREAM" in os.environ and file is None else "%(asctime)s "
    try:
        writer = LogWriter(file)
    except OSError as error:
        raise LogError(f"--log {file}: {error.strerror}; give a file that can be written") from error
    writer.setFormatter(
        logging.Formatter(
            f"{timed}%(levelname)-7s %(message)s", datefmt="%H:%M:%S" if file is None else "%Y-%m-%d %H:%M:%S"
        )
    )
    root = logging.getLogger()
    root.addHandler(writer)
    root.setLevel(logging.INFO)
    threading.excepthook = _log_failure
    try:
        yield
    finally:
        threading.excepthook = threading.__excepthook__
        root.removeHandler(writer)
        writer.stop()


class LogWriter(logging.Handler):
    """Writes to stderr in its own thread, from its making until `stop`.

    Args:
        file: see the module docstring.
    """

    def __init__(self, file: Path | None = None) -> None:
        super().__init__()
        self._file = file
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_WAITING_LINES)
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        if file is not None:
            _redirect(file)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a line over; never blocks. `logging` lets one thread in at a time."""
        try:
            # A count without the line behind it would have to be followed by another count.
            if self._num_dropped and MAX_WAITING_LINES - self._lines.qsize() < 2:  # noqa: PLR2004 - the count, the line
                raise queue.Full  # noqa: TRY301 - as for a line alone
            self._tell_dropped()
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._num_dropped += 1

    def stop(self) -> None:
        """Write what waits. When the reader does not take it in time, nothing written later can hang either."""
        with contextlib.suppress(queue.Full):
            self._tell_dropped(STOP_S)
            self._lines.put(None, timeout=STOP_S)
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a device
                os.dup2(nowhere.fileno(), _STDERR)

    def _tell_dropped(self, timeout_s: float = 0.0) -> None:
        """Put the number of lines that are missing in their place; raises queue.Full."""
        if self._num_dropped:
            message = "%d lines are not in this log: nobody read it in time"
            record = _log.makeRecord(_log.name, logging.WARNING, "", 0, message, (self._num_dropped,), None)
            self._lines.put(self.format(record), block=timeout_s > 0.0, timeout=timeout_s)
            self._num_dropped = 0

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(line)

    def _write(self, line: str) -> None:
        data = f"{line}\n".encode(errors="backslashreplace")
        with contextlib.suppress(OSError):  # the directory is gone, or not to be written: go on with what there is
            if self._file is not None and os.fstat(_STDERR).st_size + len(data) > MAX_FILE_BYTES:
                move_aside(self._file)
                _redirect(self._file)
        _write_all(data)


def say_last(text: str) -> None:
    """Write the reason for an end to stderr; a reader that does not take it in time goes without."""
    last = threading.Thread(target=_write_all, args=(f"{text}\n".encode(errors="backslashreplace"),), daemon=True)
    last.start()
    last.join(STOP_S)


def move_aside(file: Path) -> None:
    """Keep a log that is large enough under another name, in the place of the one before it."""
    file.replace(file.with_name(f"{file.name}.1"))


def _write_all(data: bytes) -> None:
    with contextlib.suppress(OSError):  # a reader that left, a full disk: there is nowhere to say so
        while data:
            data = data[os.write(_STDERR, data) :]


def _redirect(file: Path) -> None:
    with file.open("ab") as stream:
        os.dup2(stream.fileno(), _STDOUT)
        os.dup2(stream.fileno(), _STDERR)


def _log_failure(failure: threading.ExceptHookArgs) -> None:
    name = failure.thread.name if failure.thread is not None else "unknown"
    _log.critical("thread %s failed", name, exc_info=failure.exc_value)
