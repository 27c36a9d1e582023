"""A target worker: batches in, hidden states out.

It runs the frozen target on its own thread, packs its outputs without padding into one contiguous buffer and puts that
into the queue. It makes whichever batch is next when it is free; the queue knows which those are, so a resumed run goes
on with exactly the batches that were not trained on yet. It ends when there are none, or nobody takes them any more.
"""

import torch

from shared.cells import Cells
from trainer.batches import Batch, Batches
from trainer.hidden_queue import HiddenQueue
from trainer.instruments import PhaseTimers, own_thread
from trainer.target import Target
from trainer.transfers import Download, HiddenBatch, HostBuffer

PHASES = ("put", "load", "forward", "pack", "d2h")


class TargetWorker:
    """Run the target over batches and feed the queue.

    Args:
        name: of the worker, for labels.
        target: owned by this worker's thread while it runs.
        batches: shared by all workers.
        queue: says which batch is next, and takes it.
        cells: where the counters are declared.
        num_threads: of CPU kernels in this worker's thread.
    """

    def __init__(
        self,
        *,
        name: str,
        target: Target,
        batches: Batches,
        queue: HiddenQueue[HostBuffer, HiddenBatch],
        cells: Cells,
        num_threads: int,
    ) -> None:
        self._target = target
        self._batches = batches
        self._queue = queue
        self._num_threads = num_threads
        self.timers = PhaseTimers(cells, "target", name, PHASES, target.device, ("forward", "pack", "d2h"))
        labels = {"role": "target", "worker": name}
        self._num_batches = cells.counter("dflash_batches_total", **labels)
        self._num_real = cells.counter("dflash_tokens_total", **labels, kind="real")
        self._num_padding = cells.counter("dflash_tokens_total", **labels, kind="padding")

    def run(self) -> None:
        """Work until the batches end or nobody is left to take them; the thread's main function."""
        own_thread(self._target.device, self._num_threads)
        phase = self.timers.phase
        download: Download | None = None
        while True:
            with phase("put"):
                claim = self._queue.claim()
            if claim is None:
                return
            download = download or Download(
                self._target.device, claim.buffer.nbytes, self._target.embedding_weight.dtype
            )
            with phase("load"):
                batch = self._batches.batch(claim.ticket.batch_index)
            self._queue.put(claim, self._hidden(batch, claim.buffer, download))
            self._count(batch)

    def _hidden(self, batch: Batch, buffer: HostBuffer, download: Download) -> HiddenBatch:
        phase, device = self.timers.phase, self._target.device
        with phase("forward"), torch.no_grad():
            layers = self._target.forward(
                batch.input_ids.to(device, non_blocking=True),
                attention_mask=batch.attention_mask.to(device, non_blocking=True),
            ).layers
        with phase("pack"):
            packed = download.pack(layers, batch, buffer)
        with download.stream(), phase("d2h"):
            return download.copy(packed, batch, buffer)

    def _count(self, batch: Batch) -> None:
        num_real = sum(batch.lengths)
        self._num_batches.add()
        self._num_real.add(num_real)
        self._num_padding.add(batch.input_ids.numel() - num_real)
