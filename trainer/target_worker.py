"""A target worker: batches in, hidden states out.

It runs the frozen target on its own thread, drops the padding, packs what is left into one contiguous buffer and puts
it into the queue. Which batches it makes, and in which order, comes from the data cursor, so a resumed run goes on with
exactly those that were not trained on yet.

Tensor suffixes: B sequences, S positions, P packed positions (no padding), F tapped layers x hidden size.
"""
# ruff: noqa: N802, N806, N815 - tensor names carry their shape

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.cells import Cells
from trainer.batches import Batch, Batches
from trainer.hidden_queue import Sender
from trainer.instruments import PhaseTimers, own_thread
from trainer.supervisor import Stop
from trainer.target import Target

PHASES = ("load", "forward", "pack", "d2h", "put")


@dataclass(frozen=True, kw_only=True, eq=False)
class HiddenBatch:
    """One batch and the target's hidden states for it, on the host.

    Attributes:
        batch: Token ids, masks and lengths.
        hidden_PF: Outputs of the tapped layers at the real tokens, sequence after sequence.
    """

    batch: Batch
    hidden_PF: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of the hidden states."""
        return self.hidden_PF.nbytes

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.batch.lengths)

    def hidden_BSF(self, device: torch.device) -> Tensor:
        """Unpack onto a device, zeros at the padding."""
        num_sequences, num_positions = self.batch.input_ids.shape
        packed = self.hidden_PF.to(device, non_blocking=True)
        padded = packed.new_zeros(num_sequences * num_positions, packed.shape[-1])
        padded.index_copy_(0, real_positions(self.batch).to(device, non_blocking=True), packed)
        return padded.view(num_sequences, num_positions, -1)


def real_positions(batch: Batch) -> Tensor:
    """Indices of the real tokens in the flattened batch [P]; computed on the host, where the lengths are."""
    return batch.attention_mask.flatten().nonzero().flatten()


class TargetWorker:
    """Run the target over batches and feed the queue.

    Args:
        name: of the worker, for labels.
        target: owned by this worker's thread while it runs.
        batches: shared by all workers.
        indices: the batches to make, in order.
        sender: this worker's end of the queue.
        cells: where the counters are declared.
        stop: looked at before every batch.
        num_threads: of CPU kernels in this worker's thread.
    """

    def __init__(  # noqa: PLR0913 - the composition root calls it once, by keyword
        self,
        *,
        name: str,
        target: Target,
        batches: Batches,
        indices: Iterable[int],
        sender: Sender[HiddenBatch],
        cells: Cells,
        stop: Stop,
        num_threads: int,
    ) -> None:
        self._target = target
        self._batches = batches
        self._indices = indices
        self._sender = sender
        self._stop = stop
        self._num_threads = num_threads
        self.timers = PhaseTimers(cells, "target", name, PHASES, target.device, ("forward", "pack"))
        labels = {"role": "target", "worker": name}
        self._num_batches = cells.counter("dflash_batches_total", **labels)
        self._num_real = cells.counter("dflash_tokens_total", **labels, kind="real")
        self._num_padding = cells.counter("dflash_tokens_total", **labels, kind="padding")

    def run(self) -> None:
        """Work until the batches end or a stop is requested; the thread's main function."""
        own_thread(self._target.device, self._num_threads)
        phase = self.timers.phase
        with self._sender:
            for index in self._indices:
                if self._stop.requested():
                    return
                with phase("load"):
                    batch = self._batches.batch(index)
                item = self._hidden(batch)
                with phase("put"):
                    self._sender.put(item)
                self._count(batch)

    def _hidden(self, batch: Batch) -> HiddenBatch:
        phase, device = self.timers.phase, self._target.device
        with phase("forward"):
            features_BSF = self._target.features(
                batch.input_ids.to(device, non_blocking=True), batch.attention_mask.to(device, non_blocking=True)
            )
        with phase("pack"):
            real = real_positions(batch).to(device, non_blocking=True)
            packed_PF = features_BSF.flatten(0, 1).index_select(0, real)
        with phase("d2h"):
            return HiddenBatch(batch=batch, hidden_PF=packed_PF.cpu())

    def _count(self, batch: Batch) -> None:
        num_real = sum(batch.lengths)
        self._num_batches.add()
        self._num_real.add(num_real)
        self._num_padding.add(batch.input_ids.numel() - num_real)
