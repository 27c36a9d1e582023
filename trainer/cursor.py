"""Which batches have been trained on: the position in the data that a checkpoint keeps.

The queue may hand out a later batch before an earlier one, so a single number is not enough: besides the first batch
that has not been taken there is the short list of those taken ahead of it. Every batch index occurs once.
"""

from collections.abc import Iterator
from itertools import count

import msgspec


class Cursor(msgspec.Struct, frozen=True):
    """Batches trained on: all below `next_index`, and those in `ahead` (ascending)."""

    next_index: int = 0
    ahead: tuple[int, ...] = ()

    @property
    def num_taken(self) -> int:
        """How many batches have been trained on."""
        return self.next_index + len(self.ahead)

    def take(self, index: int) -> "Cursor":
        """The cursor after one more batch."""
        assert index >= self.next_index
        assert index not in self.ahead
        taken = {*self.ahead, index}
        next_index = self.next_index
        while next_index in taken:
            taken.remove(next_index)
            next_index += 1
        return Cursor(next_index, tuple(sorted(taken)))

    def remaining(self, rank: int = 0, num_ranks: int = 1) -> Iterator[int]:
        """The batches that have not been taken, in order and without end; those that fall to one of several processes.

        A batch falls to the same process whatever has been taken, so that each has its own order of batches to itself.
        """
        ahead = set(self.ahead)
        return (index for index in count(self.next_index) if index % num_ranks == rank and index not in ahead)
