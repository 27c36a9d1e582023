"""What a process feeds its drafters with: the batches that fall to it, and the queue they go through.

Batches are numbered over the whole run. A process makes those whose number leaves its rank over when divided by the
number of processes; so it has an order of its own, and a run that is resumed with as many processes goes on exactly.
"""

from collections.abc import Iterator
from itertools import islice

from trainer.batches import Batches
from trainer.checkpoint import TrainState
from trainer.config import TrainerConfig
from trainer.drafter_worker import TORCH_DTYPES
from trainer.hidden_queue import HiddenQueue, Ticket
from trainer.prepare import Materials
from trainer.rank import Rank
from trainer.transfers import HiddenBatch, HostBuffer, host_buffers


class Feed:
    """Batches, and the queue of their hidden states.

    Args:
        config: settings of the run, `train.accumulate` filled in.
        materials: samples and geometry.
        rank: this process.
        state: where training stands.
        pinned: whether a GPU copies from or to the host.

    Raises:
        ValueError: the queue's bounds are too small.
    """

    def __init__(
        self, config: TrainerConfig, materials: Materials, *, rank: Rank, state: TrainState, pinned: bool
    ) -> None:
        self.batches = Batches(materials.samples, batch_size=config.train.batch_size, seed=config.train.seed)
        self.batches_per_step = config.train.accumulate // rank.world_size
        """Batches that this process learns from in one optimizer step."""
        num_features = len(materials.geometry.target_layer_ids) * materials.geometry.target_hidden_size
        self._bytes_per_token = num_features * TORCH_DTYPES[config.target.dtype].itemsize
        self.max_batch_bytes = self.batches.max_tokens * self._bytes_per_token
        num_left = (config.train.steps - state.step) * self.batches_per_step
        indices = islice(state.cursor.remaining(rank.number, rank.world_size), num_left)
        self.queue: HiddenQueue[HostBuffer, HiddenBatch] = HiddenQueue(
            self._tickets(indices),
            host_buffers(self._num_buffers(config), self.max_batch_bytes, pinned=pinned),
            hs_min_ready=config.queue.hs_min_ready,
            oldest_every=config.queue.oldest_every,
            takes=state.step * self.batches_per_step,
        )

    def _num_buffers(self, config: TrainerConfig) -> int:
        queue, num_bytes = config.queue, self.max_batch_bytes
        count = min(queue.max_items, queue.max_bytes // num_bytes)
        if count < queue.hs_min_ready:
            raise ValueError(
                f"queue.max_bytes={queue.max_bytes} holds {count} batches of up to {num_bytes} bytes, fewer than "
                f"queue.hs_min_ready={queue.hs_min_ready}: raise it to {num_bytes * queue.max_items}, or lower "
                "train.batch_size or data.max_length"
            )
        return count

    def _tickets(self, indices: Iterator[int]) -> Iterator[Ticket]:
        for index in indices:
            lengths = self.batches.lengths(index)
            yield Ticket(batch_index=index, num_bytes=sum(lengths) * self._bytes_per_token, length=max(lengths))
