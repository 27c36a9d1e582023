"""Which process of a run this is, as torchrun says; it can be asked before torch is loaded."""

from collections.abc import Mapping
from typing import Self

import msgspec


class Rank(msgspec.Struct, frozen=True):
    """Which of how many processes this is."""

    number: int = 0
    world_size: int = 1
    local_world_size: int = 1
    """How many of them share this node."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """Read what torchrun sets."""
        return cls(
            number=int(environ.get("RANK", "0")),
            world_size=int(environ.get("WORLD_SIZE", "1")),
            local_world_size=int(environ.get("LOCAL_WORLD_SIZE", "1")),
        )

    @property
    def leads(self) -> bool:
        """Whether this process writes the files of the run and speaks for it."""
        return self.number == 0
