"""A drafter step on a device that has no values: whatever would make the host wait for a GPU fails on it at once."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tiny_models import VOCAB_SIZE, tiny_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared.catalogue import TRAINER_FAMILIES
from shared.cells import Cells
from trainer.batches import Batches
from trainer.config import TrainConfig
from trainer.data import Sample
from trainer.drafter import Drafter
from trainer.drafter_worker import Borrowed, DrafterWorker, StepPlan
from trainer.instruments import StepMailbox
from trainer.optimizer import OptimizerName
from trainer.rank import Rank
from trainer.reduce import Reduction
from trainer.step_report import StepReport
from trainer.stopping import Stop
from trainer.tiled_head import DEFAULT_TILES
from trainer.transfers import Arrival
from trainer.world import World

META = torch.device("meta")
_ATEN = torch.ops.aten


class NoBlockingCopies(TorchDispatchMode):
    """Fail on operations that need host memory on the device, but for copies that do not wait.

    The device without values lets these pass; CUDA copies such operands by itself, and the host waits for it.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func` unless it mixes the two memories and waits."""
        kwargs = kwargs or {}
        if func is _ATEN.copy_.default and args[1].device == META != args[0].device and args[2:] == (True,):
            return args[0]  # to the host without waiting for it: there are no values to bring
        out = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        mixes = any(t.device == META for t in tensors) and any(t.device != META and t.ndim > 0 for t in tensors)
        waits = not kwargs.get("non_blocking") and not (func is _ATEN.copy_.default and args[2:] == (True,))
        assert not (mixes and waits), f"{func} copies between host and device and waits for it"
        return out


class Arrivals:
    """Two batches that are on the device already, in the place of the worker's intake."""

    waited_s = 0.0

    def next(self, num_wanted: int) -> Arrival:
        """A batch of two sequences."""
        samples = [Sample(input_ids=torch.arange(n), loss_mask=torch.ones(n, dtype=torch.bool)) for n in (20, 17)]
        batch = Batches(samples, batch_size=2, seed=0).batch(num_wanted)
        return Arrival(batch=batch, hidden=torch.zeros(2, 20, 3 * 64, device=META), slot=0)

    def finish(self, arrival: Arrival) -> Tensor:
        """Its hidden states."""
        return arrival.hidden


def worker(optimizer: OptimizerName, monkeypatch: pytest.MonkeyPatch) -> DrafterWorker:
    """A drafter worker on the device without values."""
    # Autocast and fused AdamW know nothing of this device; neither reads a value on one that has them.
    monkeypatch.setattr(torch, "autocast", lambda *_args, **_kwargs: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _device_type: False)
    # By its entry in sys.modules: torch.optim hides the module.
    monkeypatch.setattr(
        sys.modules["torch.optim.adam"], "_device_dtype_check_for_fused", lambda *_args, **_kwargs: None
    )
    monkeypatch.setitem(DEFAULT_TILES, "meta", DEFAULT_TILES["cuda"])
    cells = Cells(TRAINER_FAMILIES)
    mailbox = StepMailbox(
        skipped=cells.counter("dflash_samples_skipped_total", reason="nonfinite_gradient"),
        skipped_hidden=cells.counter("dflash_samples_skipped_total", reason="nonfinite_hidden"),
        dropped=cells.counter("dflash_telemetry_dropped_steps_total"),
    )
    weight = torch.zeros(VOCAB_SIZE, 64, device=META)
    return DrafterWorker(
        number=0,
        drafter=Drafter(tiny_config("sliding")).to(META),
        borrowed=Borrowed(embedding_weight=weight, head_weight=weight),
        settings=TrainConfig(optimizer=optimizer, num_anchors=4, grad_clip=1.0),
        plan=StepPlan(last_step=1, checkpoint_every=10, num_batches=2, save=None),
        reduction=Reduction(1, World(Rank()), Stop()),
        cells=cells,
        report=StepReport(mailbox, cells),
        num_threads=1,
    )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_whole_step_reads_nothing_back(optimizer: OptimizerName, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the batches to the mailbox: no value is asked for, and no copy between host and device waits."""
    drafter = worker(optimizer, monkeypatch)

    with NoBlockingCopies():
        drafter._step(Arrivals())  # type: ignore[arg-type]  # stands for an intake

    assert drafter.state.step == 1
    assert drafter._report is not None
    assert drafter._report._mailbox.num_pending == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tensor: float(tensor.sum()),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: tensor.repeat_interleave(torch.ones(4, dtype=torch.long, device=META), dim=0),
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor[torch.tensor([0, 1])],
        lambda tensor: tensor.copy_(torch.ones(4)),
        lambda _tensor: torch.ones(4).to(META),
    ],
)
def test_what_waits_is_noticed(spoil: Any) -> None:
    """Each kind of operation that waits for a GPU fails here."""
    tensor = torch.zeros(4, device=META)

    with NoBlockingCopies(), pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        spoil(tensor)
