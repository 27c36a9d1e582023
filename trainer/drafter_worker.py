"""A drafter worker: hidden states in, optimizer steps out.

One step takes `train.accumulate` batches, draws anchors in each, and divides the summed loss by the summed weights of
all of them: a batch with few supervised tokens must not count as much as a full one. Parameters and moments are fp32;
`train.dtype` only sets what `torch.autocast` lowers the matrix products to.

Anchors are drawn from a generator seeded by (seed, batch index). So they change with every epoch, and a resumed run
draws the same ones without any random state in the checkpoint.

Nothing in a step asks the device for a value.
"""

import math
import time
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
from trainer.instruments import PhaseTimers, StepFacts, StepMailbox, own_thread
from trainer.loss import DrafterLoss, LossOptions, Objective, drafter_loss, loss_denominator
from trainer.optimizer import DrafterOptimizer
from trainer.supervisor import Stop
from trainer.target_worker import HiddenBatch

PHASES = ("get", "h2d", "forward", "backward", "optimizer", "checkpoint")
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
    """When a worker stops, saves and reports."""

    last_step: int
    checkpoint_every: int
    save: Callable[[Checkpoint], None]


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
    """Train a drafter on what the queue delivers.

    Args:
        name: of the worker, for labels.
        drafter: fp32 parameters on the worker's device.
        borrowed: the target's embedding and head on the same device.
        settings: the optimisation.
        plan: when to stop and save.
        receiver: this worker's end of the queue.
        mailbox: where finished steps go.
        cells: where the counters are declared.
        stop: looked at before every step.
        num_threads: of CPU kernels in this worker's thread.
    """

    def __init__(  # noqa: PLR0913 - the composition root calls it once, by keyword
        self,
        *,
        name: str,
        drafter: Drafter,
        borrowed: Borrowed,
        settings: TrainConfig,
        plan: StepPlan,
        receiver: Receiver[HiddenBatch],
        mailbox: StepMailbox,
        cells: Cells,
        stop: Stop,
        num_threads: int,
    ) -> None:
        self.drafter = drafter
        self._borrowed = borrowed
        self._settings = settings
        self._objective = Objective(settings.objective, settings.dpace_alpha)
        self._plan = plan
        self._receiver = receiver
        self._mailbox = mailbox
        self._stop = stop
        self._num_threads = num_threads
        self._device = borrowed.head_weight.device
        self._optimizer = DrafterOptimizer(drafter, settings.optimizer, weight_decay=settings.weight_decay)
        self.state = TrainState()
        self.timers = PhaseTimers(cells, "drafter", name, PHASES, self._device, ("h2d", "forward", "backward"))
        labels = {"role": "drafter", "worker": name}
        self._num_steps = cells.counter("dflash_steps_total")
        self._num_batches = cells.counter("dflash_batches_total", **labels)
        self._num_real = cells.counter("dflash_tokens_total", **labels, kind="real")
        self._num_padding = cells.counter("dflash_tokens_total", **labels, kind="padding")
        self._lengths = cells.histogram("dflash_sequence_length_tokens")
        self._anchors = {kind: cells.counter("dflash_anchors_total", kind=kind) for kind in ("valid", "used")}

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

    def run(self) -> None:
        """Step until the plan ends or a stop is requested, then save; the thread's main function."""
        own_thread(self._device, self._num_threads)
        self.drafter.train()
        saved_step = self.state.step
        with self._receiver:
            while self.state.step < self._plan.last_step and not self._stop.requested():
                self._step()
                if self.state.step % self._plan.checkpoint_every == 0:
                    saved_step = self._save()
        if self.state.step != saved_step:
            self._save()

    def _save(self) -> int:
        with self.timers.phase("checkpoint"):
            self._plan.save(self.checkpoint())
        return self.state.step

    def _step(self) -> None:
        start_s = time.perf_counter()
        with self.timers.phase("get"):
            items = [self._receiver.get() for _ in range(self._settings.accumulate)]
        queue_wait_s = time.perf_counter() - start_s
        with self.timers.phase("h2d"):
            blocks = [self._blocks(item) for item in items]
        denominator = torch.stack([loss_denominator(block.weights, self._objective) for block in blocks]).sum()
        losses = [self._learn(item, block, denominator) for item, block in zip(items, blocks, strict=True)]
        with self.timers.phase("optimizer"):
            rate = learning_rate(self.state.step, self._settings)
            grad_norm = nn.utils.clip_grad_norm_(self.drafter.parameters(), self._settings.grad_clip)
            self._optimizer.step(rate, grad_norm)
        self._report(items, blocks, (rate, queue_wait_s), _scalars(losses, denominator, grad_norm))

    def _blocks(self, item: HiddenBatch) -> BlockBatch:
        generator = anchor_generator(self._settings.seed, item.batch.index)
        anchors = sample_anchors(item.batch.loss_mask, self._settings.num_anchors, generator)
        input_ids = item.batch.input_ids.to(self._device, non_blocking=True)
        attention = "groups" if self._device.type == "cpu" else self._settings.gpu_attention
        layout = lay_out(item.batch.loss_mask, anchors, self.drafter.config, attention)
        return build_blocks(
            input_ids, item.batch.loss_mask, anchors, self.drafter.config, self._settings.loss_decay_gamma, layout
        )

    def _learn(self, item: HiddenBatch, block: BlockBatch, denominator: Tensor) -> DrafterLoss:
        with self.timers.phase("forward"), self._autocast():
            noise = F.embedding(block.noise_ids, self._borrowed.embedding_weight)
            hidden = self.drafter(
                noise * self.drafter.config.input_embedding_scale,
                item.hidden_BSF(self._device).to(noise.dtype),
                block.position_ids,
                block.masks,
            )
            loss = drafter_loss(
                hidden,
                self._borrowed.head_weight,
                block.labels,
                block.weights,
                self.drafter.config,
                LossOptions(objective=self._objective, slots=block.learned_slots),
            )
        with self.timers.phase("backward"):
            (loss.numerator / denominator).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return loss

    def _autocast(self) -> torch.autocast:
        dtype = TORCH_DTYPES[self._settings.dtype]
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16)

    def _report(
        self,
        items: list[HiddenBatch],
        blocks: list[BlockBatch],
        rate_and_wait_s: tuple[float, float],
        scalars: Tensor,
    ) -> None:
        rate, queue_wait_s = rate_and_wait_s
        cursor = self.state.cursor
        for item in items:
            cursor = cursor.take(item.batch.index)
        self.state = TrainState(step=self.state.step + 1, cursor=cursor)
        lengths = tuple(length for item in items for length in item.batch.lengths)
        num_real = sum(lengths)
        num_padding = sum(item.batch.input_ids.numel() for item in items) - num_real
        self._num_steps.add()
        self._num_batches.add(len(items))
        self._num_real.add(num_real)
        self._num_padding.add(num_padding)
        for length in lengths:
            self._lengths.observe(length)
        self._anchors["valid"].add(sum(block.num_valid_anchors for block in blocks))
        self._anchors["used"].add(sum(block.num_used_anchors for block in blocks))
        facts = StepFacts(
            time_s=time.time(),
            step=self.state.step,
            learning_rate=rate,
            tokens_real=num_real,
            tokens_padding=num_padding,
            sequence_lengths_tokens=lengths,
            queue_wait_s=queue_wait_s,
        )
        self._mailbox.post(facts, scalars)


def _scalars(losses: list[DrafterLoss], denominator: Tensor, grad_norm: Tensor) -> Tensor:
    """Loss, gradient norm, simulated acceptance length and accuracy per position in one tensor, still on the device.

    A figure that had nothing to be measured on is NaN.
    """

    def total(name: str) -> Tensor:
        return torch.stack([getattr(loss, name).detach() for loss in losses]).sum(dim=0)

    accept_length = total("accept_length_sum") / total("num_complete_blocks")
    accuracy = total("num_correct") / total("num_predicted")
    head = torch.stack([total("numerator") / denominator, grad_norm, accept_length])
    return torch.cat([head, accuracy])
