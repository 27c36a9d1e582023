"""What a person sees while a run trains."""

import fcntl
import io
import os
import pty
import struct
import termios

import pytest

from trainer.hidden_queue import QueueStatistics
from trainer.progress import Progress

QUEUE = QueueStatistics(
    depth=3,
    capacity=8,
    num_bytes=0,
    capacity_bytes=0,
    puts_total=0,
    gets_total=0,
    put_blocked_s=0.0,
    get_blocked_s=0.0,
    oldest_age_s=0.0,
)
FIGURES = "loss 1.500  accept 2.25"


def test_log_gets_whole_lines() -> None:
    """Into a file goes a line with step, loss, acceptance length, speed, queue and time left."""
    stream = io.StringIO()
    progress = Progress(0, 10, stream)

    progress.show(5, (1.5, 2.25), 1000.0, QUEUE, force=True)

    assert stream.getvalue().startswith(f"step 5/10  {FIGURES}  ")
    assert "tok/s  queue 3/8" in stream.getvalue()
    assert stream.getvalue().endswith(" s left\n")


@pytest.mark.parametrize(("num_rows", "shown"), [(40, b"5/10 ["), (0, b"step 5/10  ")])
def test_terminal_gets_a_bar_if_it_has_room(num_rows: int, shown: bytes) -> None:
    """A terminal shows a bar; one that has no size shows lines, where a bar would show nothing."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", num_rows, 200, 0, 0))
    with os.fdopen(slave, "w") as stream:
        progress = Progress(0, 10, stream)
        progress.show(5, (1.5, 2.25), 1000.0, QUEUE, force=True)
        progress.close()
        stream.write("end")
        stream.flush()
        seen = b""
        while not seen.endswith(b"end"):
            seen += os.read(master, 100_000)
    os.close(master)

    assert shown in seen
    assert FIGURES.encode() in seen
