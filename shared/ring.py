"""The newest records of a session, for those who come late."""

CHUNK_BYTES = 64 * 1024
"""About how much of an answer is sent at once."""


class Ring:
    """The newest records, dense in sequence number, bounded in bytes. One thread only."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bodies: dict[int, bytes] = {}
        self.first_seq = 0
        self.next_seq = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._bodies)

    def append(self, body: bytes) -> None:
        """Keep a body under the next sequence number, dropping the oldest ones over the bound."""
        self._bodies[self.next_seq] = body
        self.next_seq += 1
        self.num_bytes += len(body)
        while self.num_bytes > self._max_bytes and len(self._bodies) > 1:
            self.num_bytes -= len(self._bodies.pop(self.first_seq))
            self.first_seq += 1

    def chunk(self, first_seq: int, end_seq: int) -> tuple[int, tuple[bytes, ...]]:
        """The first held sequence number >= first_seq, and bodies from there, about CHUNK_BYTES of them."""
        seq = first_seq = max(first_seq, self.first_seq)
        bodies, size = [], 0
        while seq < min(end_seq, self.next_seq) and size < CHUNK_BYTES:
            bodies.append(self._bodies[seq])
            size += len(bodies[-1])
            seq += 1
        return first_seq, tuple(bodies)
