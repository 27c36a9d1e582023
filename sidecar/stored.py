"""What the journal holds beside records, and what the receiver hands to it at once."""

import msgspec

from shared.wire import Hello, Record
from sidecar.samples import RUN_LABEL, Labels


class StoredSession(msgspec.Struct, frozen=True, kw_only=True):
    """One session as the journal knows it; `labels` are put on each of its series for life."""

    number: int
    hello: Hello
    endpoint: str
    labels: Labels
    next_seq: int
    end_seq: int
    """Known to exist; more than `next_seq` while a gap is being repaired."""
    ended_s: float | None
    exit_code: int | None
    consumed: bool

    @property
    def name(self) -> str:
        """The session id."""
        return self.hello.session

    @property
    def run_label(self) -> str:
        """The value of its `run` label; empty when it has none."""
        return dict(self.labels).get(RUN_LABEL, "")


class LostRange(msgspec.Struct, frozen=True):
    """Records [first_seq, end_seq) of one session that nobody can bring back, and why."""

    session: str
    first_seq: int
    end_seq: int
    reason: str


class Batch(msgspec.Struct, kw_only=True):
    """What the receiver commits at once."""

    records: list[tuple[int, Record, bytes]] = []
    """Session number, record, body."""
    positions: dict[int, tuple[int, int]] = {}
    """Session number to its new (next_seq, end_seq)."""
    lost: list[LostRange] = []
    ended: list[tuple[float, int | None, int]] = []
    """When a session ended (Unix s), its exit code if it said so, session number."""
    counts: dict[tuple[str, str], int] = {}
    """(name, label) to how much was added."""
