"""Gradients and sums added up over all drafter workers, and what else they must agree on once per step.

Every worker has a replica of the drafter and adds its gradients into one flat tensor. At the end of a step they meet:
the last to arrive adds all tensors up, over the other processes too, and copies the result back, so each replica takes
the same step on the same bits. The order of the additions is that of the workers, never that of their arrival.

On GPUs nothing here waits for a device. Workers compute on the default streams of their devices, and a copy between
two devices is ordered on both of their default streams.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer.stopping import Stop
from trainer.world import World

CHUNK_VALUES = 2**24
"""Values that are copied to the first worker's device at a time: no second copy of all gradients there."""


class Share(NamedTuple):
    """What one worker did in one step, as far as the host knows."""

    batch_indices: tuple[int, ...]
    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    num_padding: int
    num_valid_anchors: int
    num_used_anchors: int


class Outcome(NamedTuple):
    """What all workers agree on at the end of a step."""

    shares: tuple[Share, ...]
    """Of the workers of this process."""
    batch_indices: tuple[int, ...]
    """Of all batches that any worker of any process has learned from."""
    stop: bool
    """Whether this was the last step, because some process was asked to stop."""


class FlatGradients:
    """The gradients of a drafter as parts of one tensor, with a few more sums behind them.

    Args:
        drafter: its parameters' gradients are made views of the tensor.
        num_sums: how many sums there are besides.
    """

    def __init__(self, drafter: nn.Module, num_sums: int) -> None:
        parameters = [p for p in drafter.parameters() if p.requires_grad]
        num_values = sum(parameter.numel() for parameter in parameters)
        self.all = torch.zeros(num_values + num_sums, device=parameters[0].device)
        self.gradients, self.sums = self.all[:num_values], self.all[num_values:]
        start = 0
        for parameter in parameters:
            end = start + parameter.numel()
            parameter.grad = self.all[start:end].view_as(parameter)
            start = end

    def clear(self) -> None:
        """Begin a new step."""
        self.all.zero_()


class Reduction:
    """Where the drafter workers of a process meet at the end of each step.

    Args:
        num_workers: how many there are.
        world: the other processes.
        stop: asked once per step.
    """

    def __init__(self, num_workers: int, world: World, stop: Stop) -> None:
        self._world = world
        self._stop = stop
        self._parts: list[tuple[Tensor, Share] | None] = [None] * num_workers
        self._barrier = threading.Barrier(num_workers, action=self._meet)
        self._outcome: Outcome | None = None

    def reduce(self, worker: int, values: Tensor, share: Share) -> Outcome:
        """Replace `values` by the sum over all workers, waiting for the others.

        Args:
            worker: number of the calling worker in this process, from 0.
            values: of the same size for every worker.
            share: what it did in this step; equally many batches for every worker.

        Raises:
            threading.BrokenBarrierError: another worker failed.
        """
        self._parts[worker] = (values, share)
        self._barrier.wait()
        # Nobody can begin the next meeting before everybody has left this one.
        assert self._outcome is not None
        return self._outcome

    def abort(self) -> None:
        """Wake everybody who waits, because a worker failed."""
        self._barrier.abort()

    def _meet(self) -> None:
        parts = [part for part in self._parts if part is not None]
        lead, *others = (values for values, _ in parts)
        with _on(lead.device):
            for to, source in _chunks(lead, others):
                to.add_(source.to(to.device, non_blocking=True))
            self._world.add_up(lead)
            for source, to in _chunks(lead, others):
                to.copy_(source, non_blocking=True)
        shares = tuple(share for _, share in parts)
        own = [index for share in shares for index in share.batch_indices]
        # One exchange between hosts: who was asked to stop, and which batches are done.
        said = self._world.collect([int(self._stop.requested()), *own])
        width = 1 + len(own)
        self._outcome = Outcome(
            shares=shares,
            batch_indices=tuple(number for position, number in enumerate(said) if position % width),
            stop=any(said[::width]),
        )


def _chunks(lead: Tensor, others: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    for other in others:
        for start in range(0, len(lead), CHUNK_VALUES):
            yield lead[start : start + CHUNK_VALUES], other[start : start + CHUNK_VALUES]


def _on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which a GPU is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
