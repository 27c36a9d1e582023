"""How a worker reports: phase timers, counters and a mailbox for what only the device knows yet.

Nothing here waits for a device. On a CPU a phase is the difference of two clock readings. On CUDA a phase is a pair of
timing events, and the scalars of a step are copied into a ring of pinned memory behind an event; the telemetry thread
reads both once they have landed, so the step path never asks for a value. The same calls serve both.
"""

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch
from torch import Tensor

from shared.cells import Cells, Counter
from shared.wire import Step

MAILBOX_STEPS = 100_000
"""Steps that may wait to be collected; at one step a millisecond this is more than a minute of a stalled reader."""


def own_thread(device: torch.device, num_threads: int) -> None:
    """Prepare the calling thread for a device.

    Args:
        device: what the thread works on.
        num_threads: of CPU kernels called from it.
    """
    torch.set_num_threads(num_threads)
    own_gpu(device)


def own_gpu(device: torch.device) -> None:
    """Make a GPU the calling thread's current one; does nothing on a CPU.

    Events are recorded on the current GPU, not on that of a tensor. And whoever asks CUDA anything with another GPU
    current, be it after an event, opens a context there: half a gigabyte on a GPU that may be somebody else's.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


class PhaseTimers:
    """Seconds and calls per phase of one worker. One thread only, except for `collect`.

    Args:
        cells: where the counters are declared.
        role: target or drafter.
        worker: name of the worker.
        phases: every phase the worker will time.
        device: phases in `device_phases` are timed on it when it is a GPU.
        device_phases: phases that only enqueue work and must be timed where it runs.
    """

    def __init__(
        self,
        cells: Cells,
        role: str,
        worker: str,
        phases: tuple[str, ...],
        device: torch.device,
        device_phases: tuple[str, ...] = (),
    ) -> None:
        labels = {"role": role, "worker": worker}
        self._seconds = {p: cells.counter("dflash_phase_seconds_total", **labels, phase=p) for p in phases}
        self._calls = {p: cells.counter("dflash_phase_calls_total", **labels, phase=p) for p in phases}
        self._on_device = frozenset(device_phases) if device.type == "cuda" else frozenset()
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=MAILBOX_STEPS)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block; its calls are counted when it ends, also by an exception."""
        if name in self._on_device:
            start, end = cuda_event(timing=True), cuda_event(timing=True)
            start.record()
            try:
                yield
            finally:
                end.record()
                self._pending.append((name, start, end))
                self._calls[name].add()
            return
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name].add(time.perf_counter() - start_s)
            self._calls[name].add()

    def collect(self) -> None:
        """Add up device phases that have finished; the telemetry thread calls it and owns those cells."""
        while self._pending:
            # Taken out first: a full deque may lose its head to the worker at any moment.
            name, start, end = phase = self._pending.popleft()
            if not _has_landed(end):
                self._pending.appendleft(phase)
                return
            self._seconds[name].add(start.elapsed_time(end) / 1000)


class StepFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the host knows about a step when it ends."""

    time_s: float
    step: int
    learning_rate: float
    tokens_real: int
    tokens_padding: int
    sequence_lengths_tokens: tuple[int, ...]
    queue_wait_s: float


class StepMailbox:
    """Steps on their way from the drafter worker, which posts, to the one thread that collects.

    Their scalars are copied into a ring that is made once: pinning memory anew for a step may wait for the GPU. It has
    a row more than steps can wait, because the collector may still be reading one that is no longer waiting.

    Args:
        skipped: counts steps whose gradient was not finite, which the optimizer left out.
        skipped_hidden: counts samples whose hidden states were not finite, which the loss left out.
        dropped: counts steps that fell out because nobody collected them.
    """

    def __init__(self, skipped: Counter, skipped_hidden: Counter, dropped: Counter) -> None:
        self._dropped = dropped
        self._pending: deque[tuple[StepFacts, Tensor, torch.cuda.Event | None]] = deque(maxlen=MAILBOX_STEPS)
        self._ring: Tensor | None = None
        self._num_posted = 0
        self._skipped = skipped
        self._skipped_hidden = skipped_hidden
        self.latest: Step | None = None
        """The newest step that has been collected."""

    @property
    def num_pending(self) -> int:
        """Steps that have been posted and not collected; any thread may read it."""
        return len(self._pending)

    def post(self, facts: StepFacts, scalars: Tensor) -> None:
        """Hand over a step; never waits.

        Args:
            facts: known on the host.
            scalars: [4 + K-1] on any device: loss, gradient norm, simulated acceptance length, samples left out,
                accuracy per position.
        """
        if len(self._pending) == MAILBOX_STEPS:
            self._dropped.add()
        on_gpu = scalars.device.type == "cuda"
        if self._ring is None:
            self._ring = torch.empty(MAILBOX_STEPS + 1, len(scalars), dtype=scalars.dtype, pin_memory=on_gpu)
        row = self._ring[self._num_posted % len(self._ring)]
        self._num_posted += 1
        row.copy_(scalars, non_blocking=True)
        event = cuda_event() if on_gpu else None
        if event is not None:
            event.record()
        self._pending.append((facts, row, event))

    def collect(self) -> Iterator[Step]:
        """Yield the steps whose scalars have landed, in order. One thread only."""
        while self._pending:
            # Taken out first: a full deque may lose its head to the worker at any moment.
            facts, scalars, event = waiting = self._pending.popleft()
            if event is not None and not _has_landed(event):
                self._pending.appendleft(waiting)
                return
            loss, grad_norm, accept_length, num_skipped, *accuracy = scalars.tolist()
            if not math.isfinite(grad_norm):
                self._skipped.add()
            self._skipped_hidden.add(num_skipped)
            self.latest = Step(
                session="",
                seq=0,
                time_s=facts.time_s,
                step=facts.step,
                loss=loss,
                accuracy_ratio=tuple(accuracy),
                accept_length_simulated=accept_length,
                learning_rate=facts.learning_rate,
                grad_norm=grad_norm,
                tokens_real=facts.tokens_real,
                tokens_padding=facts.tokens_padding,
                sequence_lengths_tokens=facts.sequence_lengths_tokens,
                queue_wait_s=facts.queue_wait_s,
            )
            yield self.latest


def cuda_event(*, timing: bool = False) -> torch.cuda.Event:
    """A new event, of the calling thread's current GPU once it is recorded."""
    return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _has_landed(event: torch.cuda.Event) -> bool:
    try:
        return bool(event.query())  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except RuntimeError:
        # After a fault every call for the GPU fails. The worker reports it; this thread has to live to tell of it.
        return False
