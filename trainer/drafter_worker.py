"""A drafter worker: hidden states in, optimizer steps out.

One step takes `train.accumulate` batches, an equal share of them in each worker, draws anchors in each, and divides the
summed gradient by the summed weights of all of them: a batch with few supervised tokens must not count as much as a
full one. Parameters and moments are fp32; `train.dtype` only sets what `torch.autocast` lowers the matrix products to.

Every worker keeps a replica of the drafter and of its optimizer; the first one of a process reports and saves.

Anchors are drawn from a generator seeded by (seed, batch index). So they change with every epoch and from worker to
worker, and a resumed run draws the same ones without any random state in the checkpoint.

Nothing in a step asks the device for a value.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everyone knows it by

from shared.cells import Cells
from trainer.anchors import BlockBatch, build_blocks, lay_out, sample_anchors
from trainer.checkpoint import Checkpoint, TrainState
from trainer.config import TrainConfig
from trainer.drafter import Drafter
from trainer.hidden_queue import Receiver
from trainer.instruments import PhaseTimers, own_thread
from trainer.intake import Intake
from trainer.loss import DrafterLoss, LossOptions, Objective, drafter_loss
from trainer.nonfinite import leave_out_nonfinite
from trainer.optimizer import DrafterOptimizer
from trainer.reduce import FlatGradients, Outcome, Reduction, Share
from trainer.step_report import StepReport
from trainer.transfers import Arrival, HiddenBatch, HostBuffer

PHASES = ("get", "h2d", "forward", "backward", "reduce", "optimizer", "checkpoint")
DEVICE_PHASES = ("h2d", "forward", "backward", "reduce", "optimizer")
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Borrowed:
    """The target's frozen tensors, on the drafter's device."""

    embedding_weight: Tensor
    """[V, H]"""
    head_weight: Tensor
    """[V, H]"""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """How much a worker does in a step, and when it stops and saves."""

    last_step: int
    checkpoint_every: int
    num_batches: int
    """Batches that one worker learns from in one step."""
    save: Callable[[Checkpoint], None] | None
    """None for all workers but one."""


def learning_rate(step: int, settings: TrainConfig) -> float:
    """Learning rate of the step with this number (from 0): linear warm-up, then cosine to zero."""
    warmup = round(settings.warmup_ratio * settings.steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(settings.steps - warmup, 1)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def anchor_generator(seed: int, batch_index: int) -> torch.Generator:
    """The generator that draws the anchors of one batch.

    Its seed is a hash: torch's CPU generator looks at 32 bits only, so of two numbers side by side one would be lost.
    """
    return torch.Generator().manual_seed(Random(f"{seed}/{batch_index}").getrandbits(32))  # noqa: S311 - not a secret


class DrafterWorker:
    """Train a replica of the drafter on what the queue delivers.

    Args:
        number: of the worker in its process, from 0.
        drafter: fp32 parameters on the worker's device; equal for all workers.
        borrowed: the target's embedding and head on the same device.
        settings: the optimisation.
        plan: how much to do, when to stop and save.
        reduction: where all workers meet.
        cells: where the counters are declared.
        report: for one worker of the process.
        num_threads: of CPU kernels in this worker's thread.
    """

    def __init__(  # noqa: PLR0913 - the composition root calls it once, by keyword
        self,
        *,
        number: int,
        drafter: Drafter,
        borrowed: Borrowed,
        settings: TrainConfig,
        plan: StepPlan,
        reduction: Reduction,
        cells: Cells,
        report: StepReport | None,
        num_threads: int,
    ) -> None:
        self.drafter = drafter
        self._number = number
        self._borrowed = borrowed
        self._settings = settings
        self._objective = Objective(settings.objective, settings.dpace_alpha)
        self._plan = plan
        self._reduction = reduction
        self._report = report
        self._num_threads = num_threads
        self._device = borrowed.head_weight.device
        self._optimizer = DrafterOptimizer(drafter, settings.optimizer, weight_decay=settings.weight_decay)
        self._flat = FlatGradients(drafter, num_sums(drafter.config.block_size))
        self.state = TrainState()
        name = str(number)
        self.timers = PhaseTimers(cells, "drafter", name, PHASES, self._device, DEVICE_PHASES)
        labels = {"role": "drafter", "worker": name}
        self._num_batches = cells.counter("dflash_batches_total", **labels)
        self._num_real = cells.counter("dflash_tokens_total", **labels, kind="real")
        self._num_padding = cells.counter("dflash_tokens_total", **labels, kind="padding")

    @property
    def num_tokens_real(self) -> float:
        """Real tokens learned from so far in this session; any thread may read it."""
        return self._num_real.value

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint; call it before `run`."""
        self.drafter.load_state_dict(checkpoint.weights)
        self._optimizer.load_state_dict(checkpoint.optimizer)
        self.state = checkpoint.state

    def checkpoint(self) -> Checkpoint:
        """Everything needed to continue; not while `run` is stepping."""
        return Checkpoint(
            weights=self.drafter.state_dict(),
            geometry=self.drafter.config,
            optimizer=self._optimizer.state_dict(),
            state=self.state,
        )

    def run(self, receiver: Receiver[HostBuffer, HiddenBatch], prefetch: int, max_batch_bytes: int) -> None:
        """Step until the plan ends or all workers agree to stop, then save; the thread's main function."""
        own_thread(self._device, self._num_threads)
        self.drafter.train()
        saved_step = self.state.step
        intake = Intake(receiver, self._device, prefetch=prefetch, num_bytes=max_batch_bytes, timers=self.timers)
        stop = False
        with receiver:
            while self.state.step < self._plan.last_step and not stop:
                stop = self._step(intake)
                if self.state.step % self._plan.checkpoint_every == 0:
                    saved_step = self._save()
        if self.state.step != saved_step:
            self._save()

    def _save(self) -> int:
        if self._plan.save is not None:
            with self.timers.phase("checkpoint"):
                self._plan.save(self.checkpoint())
        return self.state.step

    def _step(self, intake: Intake) -> bool:
        waited_s = intake.waited_s
        self._flat.clear()
        num_left = (self._plan.last_step - self.state.step) * self._plan.num_batches
        learned = [self._learn(intake, num_left - done) for done in range(self._plan.num_batches)]
        share = _share(learned)
        with self.timers.phase("reduce"):
            outcome = self._reduction.reduce(self._number, self._flat.all, share)
        with self.timers.phase("optimizer"):
            self._flat.gradients.div_(self._flat.sums[1])
            rate = learning_rate(self.state.step, self._settings)
            grad_norm = nn.utils.clip_grad_norm_(self.drafter.parameters(), self._settings.grad_clip)
            self._optimizer.step(rate, grad_norm)
        self._count(share, outcome)
        if self._report is not None:
            figures = (rate, intake.waited_s - waited_s)
            self._report.step(self.state.step, outcome.shares, figures, _scalars(self._flat.sums, grad_norm))
        return outcome.stop

    def _learn(self, intake: Intake, num_left: int) -> tuple[Arrival, BlockBatch]:
        arrival = intake.next(num_left)
        block = self._blocks(arrival)
        with self.timers.phase("forward"), self._autocast():
            noise = F.embedding(block.noise_ids, self._borrowed.embedding_weight)
            kept = leave_out_nonfinite(intake.finish(arrival).to(noise.dtype), block.weights)
            hidden = self.drafter(
                noise * self.drafter.config.input_embedding_scale,
                kept.hidden,
                block.position_ids,
                block.masks,
            )
            loss = drafter_loss(
                hidden,
                self._borrowed.head_weight,
                block.labels,
                kept.weights,
                self.drafter.config,
                LossOptions(objective=self._objective, slots=block.learned_slots),
            )
        with self.timers.phase("backward"):
            loss.numerator.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._flat.sums.add_(_sums(loss, kept.num_skipped))
        return arrival, block

    def _blocks(self, arrival: Arrival) -> BlockBatch:
        batch = arrival.batch
        generator = anchor_generator(self._settings.seed, batch.index)
        anchors = sample_anchors(batch.loss_mask, self._settings.num_anchors, generator)
        input_ids = batch.input_ids.to(self._device, non_blocking=True)
        attention = "groups" if self._device.type == "cpu" else self._settings.gpu_attention
        layout = lay_out(batch.loss_mask, anchors, self.drafter.config, attention)
        return build_blocks(
            input_ids, batch.loss_mask, anchors, self.drafter.config, self._settings.loss_decay_gamma, layout
        )

    def _autocast(self) -> torch.autocast:
        dtype = TORCH_DTYPES[self._settings.dtype]
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16)

    def _count(self, share: Share, outcome: Outcome) -> None:
        cursor = self.state.cursor
        for index in outcome.batch_indices:
            cursor = cursor.take(index)
        self.state = TrainState(step=self.state.step + 1, cursor=cursor)
        self._num_batches.add(len(share.batch_indices))
        self._num_real.add(sum(share.lengths))
        self._num_padding.add(share.num_padding)


def _share(learned: list[tuple[Arrival, BlockBatch]]) -> Share:
    batches = [arrival.batch for arrival, _ in learned]
    lengths = tuple(length for batch in batches for length in batch.lengths)
    return Share(
        batch_indices=tuple(batch.index for batch in batches),
        lengths=lengths,
        num_padding=sum(batch.input_ids.numel() for batch in batches) - sum(lengths),
        num_valid_anchors=sum(block.num_valid_anchors for _, block in learned),
        num_used_anchors=sum(block.num_used_anchors for _, block in learned),
    )


def num_sums(block_size: int) -> int:
    """How many figures `_sums` returns."""
    return 5 + 2 * (block_size - 1)


def _sums(loss: DrafterLoss, num_skipped: Tensor) -> Tensor:
    """Everything of a loss that is added up over batches and workers, in one tensor, still on the device."""
    accepted = (loss.accept_length_sum, loss.num_complete_blocks)
    single = (loss.numerator.detach(), loss.denominator, *accepted, num_skipped)
    return torch.cat([torch.stack(single), loss.num_correct, loss.num_predicted])


def _scalars(sums: Tensor, grad_norm: Tensor) -> Tensor:
    """Loss, gradient norm, simulated acceptance length, skipped samples and accuracy per position in one tensor.

    Still on the device. A figure that had nothing to be measured on is NaN.
    """
    numerator, denominator, accept_length_sum, num_complete_blocks, num_skipped = sums[:5]
    num_correct, num_predicted = sums[5:].chunk(2)
    head = torch.stack([numerator / denominator, grad_norm, accept_length_sum / num_complete_blocks, num_skipped])
    return torch.cat([head, num_correct / num_predicted])
