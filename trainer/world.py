"""The processes of one run, one per node, as `torchrun` starts them.

They meet through `torch.distributed`: gloo for what hosts agree on, NCCL for gradients on GPUs. A run of one process
needs none of it, and then nothing here does anything.
"""

from dataclasses import dataclass
from typing import Self, TypeVar

import torch
from torch import Tensor, distributed

from trainer.rank import Rank

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Collectives over all processes. Every process calls the same ones in the same order, one thread at a time.

    Attributes:
        rank: this process.
    """

    rank: Rank

    @classmethod
    def join(cls, rank: Rank, *, on_gpu: bool) -> Self:
        """Meet the other processes; waits until all are there."""
        if rank.world_size > 1:
            distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
        return cls(rank)

    def leave(self) -> None:
        """Part from the others without waiting for them."""
        if self.rank.world_size > 1:
            distributed.destroy_process_group()

    def add_up(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all processes."""
        if self.rank.world_size > 1:
            distributed.all_reduce(tensor)

    def collect(self, numbers: list[int]) -> list[int]:
        """Concatenate equally long lists of all processes, in the order of their ranks."""
        if self.rank.world_size == 1:
            return numbers
        parts = [torch.empty(len(numbers), dtype=torch.int64) for _ in range(self.rank.world_size)]
        distributed.all_gather(parts, torch.tensor(numbers, dtype=torch.int64))
        return [int(number) for part in parts for number in part]

    def from_lead(self, value: T) -> T:
        """The value that the first process has."""
        values: list[T] = [value]
        if self.rank.world_size > 1:
            distributed.broadcast_object_list(values)
        return values[0]
