"""Batches of samples of like length, addressed by one integer.

A batch is a pure function of (samples, batch size, seed, index), so the position in the data that a checkpoint keeps
is the index of the next batch, and several workers can take batches from one `Batches` without agreeing on anything
but who takes which index.

Each epoch visits every sample once, in a new order. Padding is wasted work, so batches are cut from runs of samples
sorted by length; the runs are random and the order of the batches is shuffled again, so length does not correlate
with time.

Tensor suffixes: B sequences, S positions.
"""

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.data import Sample

BATCHES_PER_RUN = 16
NUM_PLANS = 2
"""Epochs whose order is remembered: workers ahead are in the next one while others still finish the last."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Samples padded on the right to the longest of them.

    Attributes:
        index: The batch's number since the start of training.
        input_ids: Token ids, int64; 0 at padding.
        attention_mask: True at real tokens, bool.
        loss_mask: True at the target's own tokens, bool.
        lengths: Real tokens of each sequence.
    """

    index: int
    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    lengths: tuple[int, ...]


class Batches:
    """An endless, reproducible sequence of batches; safe to call from several threads.

    Args:
        samples: At least one.
        batch_size: Sequences in a batch; the last batch of an epoch may be smaller.
        seed: Of the order.
    """

    def __init__(self, samples: Sequence[Sample], *, batch_size: int, seed: int) -> None:
        assert samples
        assert batch_size > 0
        self._samples = samples
        self._batch_size = batch_size
        self._seed = seed
        self._plans: dict[int, list[list[int]]] = {}
        self._lock = threading.Lock()

    @property
    def num_batches_per_epoch(self) -> int:
        """Batches in which every sample occurs once."""
        return -(-len(self._samples) // self._batch_size)

    @property
    def max_tokens(self) -> int:
        """No batch has more real tokens."""
        return sum(sorted(map(len, self._samples))[-self._batch_size :])

    def lengths(self, index: int) -> tuple[int, ...]:
        """Real tokens of each sequence of the batch with this number, without making it."""
        return tuple(len(sample) for sample in self._members(index))

    def batch(self, index: int) -> Batch:
        """Return the batch with this number, counted from 0 over all epochs."""
        return self._collate(index, self._members(index))

    def _members(self, index: int) -> list[Sample]:
        epoch, position = divmod(index, self.num_batches_per_epoch)
        with self._lock:
            if epoch not in self._plans:
                if len(self._plans) == NUM_PLANS:
                    del self._plans[next(iter(self._plans))]
                self._plans[epoch] = self._plan_epoch(epoch)
            plan = self._plans[epoch]
        return [self._samples[i] for i in plan[position]]

    def _plan_epoch(self, epoch: int) -> list[list[int]]:
        # Seeded by text, because torch's generator heeds only 32 bits of a number.
        rng = random.Random(f"{self._seed}/{epoch}")  # noqa: S311 - an order, not a secret
        order = list(range(len(self._samples)))
        rng.shuffle(order)
        batches: list[list[int]] = []
        run_size = self._batch_size * BATCHES_PER_RUN
        for start in range(0, len(order), run_size):
            run = sorted(order[start : start + run_size], key=lambda i: len(self._samples[i]))
            batches += [run[i : i + self._batch_size] for i in range(0, len(run), self._batch_size)]
        rng.shuffle(batches)
        return batches

    def _collate(self, index: int, samples: Sequence[Sample]) -> Batch:
        lengths = tuple(len(sample) for sample in samples)
        shape = (len(samples), max(lengths))
        input_ids = torch.zeros(shape, dtype=torch.int64)
        loss_mask = torch.zeros(shape, dtype=torch.bool)
        for row, sample in enumerate(samples):
            input_ids[row, : len(sample)] = sample.input_ids
            loss_mask[row, : len(sample)] = sample.loss_mask
        attention_mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
        return Batch(
            index=index,
            input_ids=input_ids,
            attention_mask=attention_mask,
            loss_mask=loss_mask,
            lengths=lengths,
        )
