"""Replays that were asked for and not yet finished: few per asker, and one chunk for each asker in turn.

So an asker that wants everything, again and again, delays the others by its share and takes no memory worth naming.
What is refused here is asked for again: a sidecar repeats what stays unanswered.
"""

from shared.ring import Ring
from shared.wire import ReplayChunk, ReplayRequest

MAX_ASKERS = 64
MAX_PER_ASKER = 4


class Replays:
    """Open requests by asker, in the order of their turns."""

    def __init__(self) -> None:
        self._open: dict[str, dict[bytes, ReplayRequest]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def add(self, asker: str, request: ReplayRequest) -> None:
        """Take a request in, unless there are too many."""
        mine = self._open.get(asker, {})
        if len(mine) < MAX_PER_ASKER and (mine or len(self._open) < MAX_ASKERS):
            self._open.setdefault(asker, mine).setdefault(request.topic, request)

    def cancel(self, asker: str | None, topic: bytes) -> None:
        """Forget a request; an asker of None is one that is gone, whoever it was."""
        for name in [asker] if asker is not None else list(self._open):
            mine = self._open.get(name, {})
            if mine.pop(topic, None) is not None and not mine:
                del self._open[name]

    def next_chunk(self, ring: Ring) -> tuple[bytes, ReplayChunk] | None:
        """Topic and next part of the answer to whoever's turn it is."""
        for asker, mine in self._open.items():
            topic, request = next(iter(mine.items()))
            first_seq, bodies = ring.chunk(request.first, request.end)
            next_seq = first_seq + len(bodies)
            done = not bodies or next_seq >= min(request.end, ring.next_seq)
            del self._open[asker], mine[topic]
            if not done:
                mine[topic] = ReplayRequest(request.session, next_seq, request.end, request.nonce)
            if mine:
                self._open[asker] = mine
            return topic, ReplayChunk(session=request.session, first_seq=first_seq, bodies=bodies, done=done)
        return None
