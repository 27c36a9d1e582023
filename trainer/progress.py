"""What a person sees while a run trains: one line with a bar on a terminal, a plain line now and then in a log."""

import os
import sys
import time
from typing import TextIO

from tqdm import tqdm

from trainer.hidden_queue import QueueStatistics

TERMINAL_INTERVAL_S = 0.5
LOG_INTERVAL_S = 10.0


class Progress:
    """Show steps, loss, acceptance length, tokens per second, queue and time left. One thread only.

    Args:
        first_step: where this session starts.
        last_step: where it ends.
        stream: where to write, else standard output; a terminal gets a bar.
    """

    def __init__(self, first_step: int, last_step: int, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout
        # A terminal of no size, as some containers give, would show nothing of a bar.
        self._interactive = stream.isatty() and os.get_terminal_size(stream.fileno()).lines > 1
        self._interval_s = TERMINAL_INTERVAL_S if self._interactive else LOG_INTERVAL_S
        self._stream = stream
        self._start_s = time.monotonic()
        self._next_s = self._start_s
        self._bar = tqdm(
            total=last_step,
            initial=first_step,
            unit="step",
            file=stream,
            dynamic_ncols=True,
            disable=not self._interactive,
        )
        self._first_step = first_step
        self._last_step = last_step

    def show(
        self, step: int, figures: tuple[float, float], tokens: float, queue: QueueStatistics, *, force: bool = False
    ) -> None:
        """Update the line, at most every so often.

        Args:
            step: newest step.
            figures: its loss and simulated acceptance length.
            tokens: real tokens trained on in this session.
            queue: newest reading.
            force: show it whatever the time, as at the end.
        """
        now_s = time.monotonic()
        if now_s < self._next_s and not force:
            return
        self._next_s = now_s + self._interval_s
        elapsed_s = now_s - self._start_s
        loss, accept_length = figures
        text = (
            f"loss {loss:.3f}  accept {accept_length:.2f}  {tokens / elapsed_s:,.0f} tok/s  "
            f"queue {queue.depth}/{queue.capacity}"
        )
        if self._interactive:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
            self._bar.refresh()
        else:
            done = max(step - self._first_step, 1)
            left_s = elapsed_s / done * (self._last_step - step)
            self.say(f"step {step}/{self._last_step}  {text}  {left_s:.0f} s left")

    def say(self, line: str) -> None:
        """Print a line without tearing the bar."""
        if self._interactive:
            self._bar.write(line, file=self._stream)
        else:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the last state of the bar standing."""
        self._bar.close()
