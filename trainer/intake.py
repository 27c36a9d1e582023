"""What a drafter worker learns from next: batches out of the queue, on its device a little before they are needed."""

import time
from collections import deque

import torch

from trainer.hidden_queue import Receiver
from trainer.instruments import PhaseTimers
from trainer.transfers import Arrival, HiddenBatch, HostBuffer, Upload


class Intake:
    """Take batches and start their copies ahead of time. One thread only.

    Which batches come, and in which order, is the queue's decision; how many are fetched ahead changes neither.

    Args:
        receiver: this worker's end of the queue.
        device: where the drafter runs.
        prefetch: batches on their way while one is being learned from.
        num_bytes: of the largest batch.
        timers: of the worker.
    """

    def __init__(
        self,
        receiver: Receiver[HostBuffer, HiddenBatch],
        device: torch.device,
        *,
        prefetch: int,
        num_bytes: int,
        timers: PhaseTimers,
    ) -> None:
        self._receiver = receiver
        self._prefetch = prefetch
        self._upload = Upload(device, prefetch + 1, num_bytes)
        self._arrivals: deque[Arrival] = deque()
        self._timers = timers
        self.waited_s = 0.0
        """Time spent waiting for the queue so far."""

    def next(self, num_wanted: int) -> Arrival:
        """Return the next batch, waiting for it, and fetch ahead what is ready without waiting.

        Args:
            num_wanted: batches that will be asked for yet, this one included; no more are taken.

        Raises:
            QueueClosedError: the run ends early.
        """
        if not self._arrivals:
            start_s = time.perf_counter()
            with self._timers.phase("get"):
                item = self._receiver.get()
            self.waited_s += time.perf_counter() - start_s
            self._start(item)
        while len(self._arrivals) < min(1 + self._prefetch, num_wanted):
            ahead = self._receiver.get_if_ready()
            if ahead is None:
                break
            self._start(ahead)
        return self._arrivals.popleft()

    def finish(self, arrival: Arrival) -> torch.Tensor:
        """Hidden states of an arrival [B, S, F], zeros at the padding, ready to be computed with."""
        return self._upload.finish(arrival)

    def _start(self, item: HiddenBatch) -> None:
        with self._upload.stream():
            self._arrivals.append(self._upload.start(item, self._timers.phase("h2d")))
        self._receiver.release(item.buffer)
