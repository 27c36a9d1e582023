"""What is counted and published once per step for all drafter workers of a process."""

import time

from torch import Tensor

from shared.cells import Cells
from trainer.instruments import StepFacts, StepMailbox
from trainer.reduce import Share


class StepReport:
    """What the first worker of a process tells about a step, for all workers of the process.

    Args:
        mailbox: where finished steps go.
        cells: where the counters are declared.
    """

    def __init__(self, mailbox: StepMailbox, cells: Cells) -> None:
        self._mailbox = mailbox
        self._num_steps = cells.counter("dflash_steps_total")
        self._lengths = cells.histogram("dflash_sequence_length_tokens")
        self._anchors = {kind: cells.counter("dflash_anchors_total", kind=kind) for kind in ("valid", "used")}

    def step(self, step: int, shares: tuple[Share, ...], rate_and_wait_s: tuple[float, float], scalars: Tensor) -> None:
        """Count a step and post it with what the device knows of it."""
        rate, queue_wait_s = rate_and_wait_s
        lengths = tuple(length for share in shares for length in share.lengths)
        self._num_steps.add()
        for length in lengths:
            self._lengths.observe(length)
        self._anchors["valid"].add(sum(share.num_valid_anchors for share in shares))
        self._anchors["used"].add(sum(share.num_used_anchors for share in shares))
        facts = StepFacts(
            time_s=time.time(),
            step=step,
            learning_rate=rate,
            tokens_real=sum(lengths),
            tokens_padding=sum(share.num_padding for share in shares),
            sequence_lengths_tokens=lengths,
            queue_wait_s=queue_wait_s,
        )
        self._mailbox.post(facts, scalars)
