"""Steps wait in a ring of memory that is made once, and none is taken for another."""

import pytest
import torch

from shared.catalogue import TRAINER_FAMILIES
from shared.cells import Cells
from trainer import instruments
from trainer.instruments import StepFacts, StepMailbox

MAX_STEPS = 4


class Mailbox:
    """A mailbox for four steps, and what it counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(instruments, "MAILBOX_STEPS", MAX_STEPS)
        cells = Cells(TRAINER_FAMILIES)
        self.dropped = cells.counter("dflash_telemetry_dropped_steps_total")
        self.skipped = cells.counter("dflash_samples_skipped_total", reason="nonfinite_gradient")
        self.skipped_hidden = cells.counter("dflash_samples_skipped_total", reason="nonfinite_hidden")
        self.mailbox = StepMailbox(self.skipped, self.skipped_hidden, self.dropped)
        self._scalars = torch.zeros(6)

    def post(self, step: int, grad_norm: float = 1.0) -> int:
        """Post a step whose loss is its number, always in the same tensor; returns where its scalars lie."""
        self._scalars.copy_(torch.tensor([step, grad_norm, 1.5, 2.0, 0.5, 0.25]))
        facts = StepFacts(
            time_s=float(step),
            step=step,
            learning_rate=0.1,
            tokens_real=1,
            tokens_padding=0,
            sequence_lengths_tokens=(1,),
            queue_wait_s=0.0,
        )
        self.mailbox.post(facts, self._scalars)
        return self.mailbox._pending[-1][1].data_ptr()

    def collect(self) -> list[tuple[int, float]]:
        """Step and loss of what has landed."""
        return [(step.step, step.loss) for step in self.mailbox.collect()]


def test_each_step_keeps_its_own_scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collected now and then, over many turns of the ring, every step comes once, in order, with its own figures."""
    box, found = Mailbox(monkeypatch), []
    for step in range(1, 51):
        box.post(step)
        if step % 3 == 0:
            found += box.collect()
    found += box.collect()

    assert found == [(step, float(step)) for step in range(1, 51)]
    assert box.dropped.value == 0


def test_what_nobody_collects_falls_out_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten steps the newest four are left, unharmed, and six are counted."""
    box = Mailbox(monkeypatch)
    for step in range(1, 11):
        box.post(step)

    assert box.collect() == [(step, float(step)) for step in range(7, 11)]
    assert box.dropped.value == 6


def test_no_step_takes_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred steps share the rows of the ring: on a GPU new pinned memory may wait for it."""
    box = Mailbox(monkeypatch)

    assert len({box.post(step) for step in range(100)}) == MAX_STEPS + 1


def test_a_gradient_that_is_not_finite_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Infinite and undefined norms both count as a step that the optimizer left out."""
    box = Mailbox(monkeypatch)
    for step, grad_norm in enumerate((1.0, float("inf"), float("nan")), start=1):
        box.post(step, grad_norm)
    box.collect()

    assert box.skipped.value == 2
    assert box.skipped_hidden.value == 3 * 2.0, "two samples a step"


def test_a_step_that_has_not_landed_waits_at_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the event of the oldest step is open nothing comes out; once it has happened all come in order."""
    box = Mailbox(monkeypatch)
    landed: list[object] = []
    monkeypatch.setattr(instruments, "_has_landed", landed.__contains__)
    for step in (1, 2):
        box.post(step)
    facts, row, _ = box.mailbox._pending[0]
    box.mailbox._pending[0] = (facts, row, "event")  # type: ignore[assignment]  # stands for one of CUDA
    before = box.collect()
    landed.append("event")

    assert before == []
    assert box.collect() == [(1, 1.0), (2, 2.0)]
