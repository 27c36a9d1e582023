"""Everything the sidecar accepted, in one SQLite file: the queue between receiver and pipeline, and the past.

The receiver thread stores records under (session, seq) and moves each session's `next_seq`, before which every record
is stored or declared lost; the main thread reads up to there. Records are keyed by one integer, session number in the
high bits and seq in the low ones, so a session is a contiguous key range and reading it in order is a plain scan.
The receiver's counts are committed together with the records they count, so no kill can make them disagree.

WAL with synchronous=NORMAL: a commit survives kill -9 of the process; what a power cut takes is asked for again.
One connection writes and one reads, each behind its own lock, so no reader waits for a commit.
"""

import contextlib
import sqlite3
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from shared.wire import Event, Hello, Record, Snap, Step, decode, decode_record
from sidecar.database import connect, open_database
from sidecar.retention import trim
from sidecar.samples import Labels, Sample

SCHEMA_VERSION = 1
SEQ_BITS = 40
MAX_SEQ = 1 << SEQ_BITS
READ_BATCH = 500
_SCHEMA = """
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY, session TEXT NOT NULL UNIQUE, endpoint TEXT NOT NULL, labels TEXT NOT NULL,
    hello BLOB NOT NULL, next_seq INTEGER NOT NULL DEFAULT 0, end_seq INTEGER NOT NULL DEFAULT 0, ended_s REAL,
    exit_code INTEGER,
    consumed INTEGER NOT NULL DEFAULT 0);
CREATE TABLE records (key INTEGER PRIMARY KEY, time_s REAL NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL);
CREATE INDEX events ON records (key) WHERE kind = 'event';
CREATE TABLE lost (session TEXT NOT NULL, first_seq INTEGER NOT NULL, end_seq INTEGER NOT NULL, reason TEXT NOT NULL);
CREATE TABLE samples (id INTEGER PRIMARY KEY, time_s REAL NOT NULL, body BLOB NOT NULL);
CREATE INDEX samples_time ON samples (time_s);
CREATE TABLE counts (name TEXT NOT NULL, label TEXT NOT NULL, value INTEGER NOT NULL, PRIMARY KEY (name, label));
"""


R = TypeVar("R", Snap, Step, Event)
_KINDS: dict[type[Record], str] = {Snap: "snap", Step: "step", Event: "event"}


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


class Journal:
    """The file and its two connections. Every method may be called from any thread.

    Raises:
        DatabaseError: the file was written by a newer version, or cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._write_lock = threading.Lock()
        self._read_lock = threading.Lock()
        self._writer = open_database(path, _SCHEMA, SCHEMA_VERSION)
        self._reader = connect(path)

    def close(self) -> None:
        """Commit and close both connections."""
        with self._write_lock, self._read_lock:
            self._reader.close()
            self._writer.close()

    def open_session(self, hello: Hello, body: bytes, endpoint: str, labels: Labels) -> StoredSession:
        """Store a session at its first hello, or refresh it (and reopen it if it had ended) at a later one."""
        with self._write_lock, self._writer as connection:
            connection.execute(
                "INSERT INTO sessions (session, endpoint, labels, hello) VALUES (?, ?, ?, ?) ON CONFLICT (session) "
                "DO UPDATE SET hello = excluded.hello, endpoint = excluded.endpoint, "
                "ended_s = NULL, exit_code = NULL, consumed = 0",
                (hello.session, endpoint, msgspec.json.encode(labels).decode(), body),
            )
            rows = connection.execute(f"{_SELECT_SESSION} WHERE session = ?", (hello.session,))
            return _session(rows.fetchone())

    def mark_consumed(self, number: int) -> None:
        """Note that the pipeline has finished with an ended session; the next start notes it again if it fails."""
        with self._write_lock, contextlib.suppress(sqlite3.OperationalError), self._writer as connection:
            connection.execute("UPDATE sessions SET consumed = 1 WHERE id = ? AND ended_s IS NOT NULL", (number,))

    def reopen_sessions(self) -> None:
        """Have the pipeline go through every session again, because what it made of them is lost."""
        with self._write_lock, self._writer as connection:
            connection.execute("UPDATE sessions SET consumed = 0")

    def sessions(self) -> list[StoredSession]:
        """Every session in order of acceptance."""
        return self._sessions("")

    def unconsumed_sessions(self) -> list[StoredSession]:
        """The sessions that the pipeline has not finished with, in order of acceptance."""
        return self._sessions("WHERE consumed = 0")

    def append(self, batch: Batch) -> None:
        """Commit a batch: all of it or, on sqlite3.Error, nothing."""
        with self._write_lock, self._writer as connection:
            connection.executemany(
                "INSERT OR IGNORE INTO records VALUES (?, ?, ?, ?)",
                [(_key(n, record.seq), record.time_s, _KINDS[type(record)], body) for n, record, body in batch.records],
            )
            connection.executemany(
                "UPDATE sessions SET next_seq = ?, end_seq = ? WHERE id = ?",
                [(*position, number) for number, position in batch.positions.items()],
            )
            connection.executemany("UPDATE sessions SET ended_s = ?, exit_code = ? WHERE id = ?", batch.ended)
            connection.executemany("INSERT INTO lost VALUES (?, ?, ?, ?)", map(msgspec.structs.astuple, batch.lost))
            connection.executemany(
                "INSERT INTO counts VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET value = value + excluded.value",
                [(name, label, amount) for (name, label), amount in batch.counts.items()],
            )

    def held_seqs(self, number: int, first_seq: int) -> list[int]:
        """Sequence numbers of the stored records of a session from `first_seq` on."""
        with self._read_lock:
            rows = self._reader.execute(
                "SELECT key FROM records WHERE key >= ? AND key < ?", (_key(number, first_seq), _key(number + 1, 0))
            )
            return [key & (MAX_SEQ - 1) for (key,) in rows]

    def records(self, session: StoredSession, first_seq: int, end_seq: int) -> Iterator[Record]:
        """Yield the stored records of [first_seq, end_seq) in order; lost ones are simply not there."""
        key, end = _key(session.number, first_seq), _key(session.number, end_seq)
        while True:
            with self._read_lock:
                rows = self._reader.execute(
                    "SELECT key, body FROM records WHERE key >= ? AND key < ? ORDER BY key LIMIT ?",
                    (key, end, READ_BATCH),
                ).fetchall()
            for _, body in rows:
                yield decode_record(body)
            if len(rows) < READ_BATCH:
                return
            key = rows[-1][0] + 1

    def newest(self, session: StoredSession, kind: type[R]) -> Iterator[R]:
        """Yield the readable records of one kind, newest first."""
        # The kind is spelt out because only then does SQLite use the index on events.
        query = (
            f"SELECT key, body FROM records WHERE key >= ? AND key < ? AND kind = '{_KINDS[kind]}' "  # noqa: S608 - own word
            "ORDER BY key DESC LIMIT 1"
        )
        first_key, end_key = _key(session.number, 0), _key(session.number, session.next_seq)
        while (row := self._one(query, (first_key, end_key))) is not None:
            end_key, body = row
            record = decode_record(body)
            assert isinstance(record, kind)
            yield record

    def first_seq_since(self, session: StoredSession, time_s: float) -> int:
        """Sequence number of about the first record at or after a time; `next_seq` when there is none.

        Records are close to ordered in time, so this bisects over seq instead of keeping an index.
        """
        low, high = 0, session.next_seq
        while low < high:
            middle = (low + high) // 2
            found_s = self._time_s(_key(session.number, middle), _key(session.number, high), "ASC")
            if found_s is None or found_s >= time_s:
                high = middle
            else:
                low = middle + 1
        return low

    def last_time_s(self, number: int) -> float | None:
        """Time of the newest stored record of a session."""
        return self.time_before_s(number, MAX_SEQ - 1)

    def time_before_s(self, number: int, seq: int) -> float | None:
        """Time of the newest stored record of a session before `seq`."""
        return self._time_s(_key(number, 0), _key(number, seq), "DESC")

    def time_from_s(self, number: int, seq: int) -> float | None:
        """Time of the oldest stored record of a session from `seq` on."""
        return self._time_s(_key(number, seq), _key(number + 1, 0), "ASC")

    def counts(self) -> Mapping[tuple[str, str], int]:
        """All committed counts by (name, label)."""
        with self._read_lock:
            return {(name, label): value for name, label, value in self._reader.execute("SELECT * FROM counts")}

    def count(self, name: str, label: str) -> None:
        """Add one to a count, if the disk has room."""
        with contextlib.suppress(sqlite3.OperationalError):
            self.append(Batch(counts={(name, label): 1}))

    def lost_ranges(self) -> list[LostRange]:
        """Every range that was declared lost, oldest first."""
        with self._read_lock:
            return [LostRange(*row) for row in self._reader.execute("SELECT * FROM lost ORDER BY rowid")]

    def append_samples(self, samples: Sequence[Sample]) -> None:
        """Store collector samples that were taken together, if the disk has room for them."""
        if samples:
            body = zlib.compress(msgspec.msgpack.encode(samples), 1)
            with self._write_lock, contextlib.suppress(sqlite3.OperationalError), self._writer as connection:
                connection.execute("INSERT INTO samples (time_s, body) VALUES (?, ?)", (samples[0].time_s, body))

    def samples_between(self, start_s: float, end_s: float) -> Iterator[Sample]:
        """Yield collector samples of groups taken in [start_s, end_s), in order of time."""
        with self._read_lock:
            rows = self._reader.execute(
                "SELECT body FROM samples WHERE time_s >= ? AND time_s < ? ORDER BY time_s", (start_s, end_s)
            ).fetchall()
        for (body,) in rows:
            yield from msgspec.msgpack.decode(zlib.decompress(body), type=list[Sample])

    def trim(self, oldest_s: float, max_bytes: int) -> bool:
        """Drop what is over the bounds (`sidecar.retention`); True when more is due."""
        with self._write_lock, contextlib.suppress(sqlite3.OperationalError):
            return trim(self._writer, oldest_s, max_bytes)
        return False

    def _sessions(self, where: str) -> list[StoredSession]:
        with self._read_lock:
            return [_session(row) for row in self._reader.execute(f"{_SELECT_SESSION} {where} ORDER BY id")]

    def _time_s(self, key: int, end_key: int, order: Literal["ASC", "DESC"]) -> float | None:
        row = self._one(
            f"SELECT time_s FROM records WHERE key >= ? AND key < ? ORDER BY key {order} LIMIT 1",  # noqa: S608 - two words
            (key, end_key),
        )
        return None if row is None else row[0]

    def _one(self, query: str, parameters: tuple[int, int]) -> tuple[Any, ...] | None:
        with self._read_lock:
            row: tuple[Any, ...] | None = self._reader.execute(query, parameters).fetchone()
        return row


_SELECT_SESSION = "SELECT id, hello, endpoint, labels, next_seq, end_seq, ended_s, exit_code, consumed FROM sessions"


def _key(number: int, seq: int) -> int:
    return (number << SEQ_BITS) + seq


def _session(row: tuple[int, bytes, str, str, int, int, float | None, int | None, int]) -> StoredSession:
    number, body, endpoint, labels, next_seq, end_seq, ended_s, exit_code, consumed = row
    hello = decode(body)
    assert isinstance(hello, Hello)
    return StoredSession(
        number=number,
        hello=hello,
        endpoint=endpoint,
        labels=msgspec.json.decode(labels, type=Labels),
        next_seq=next_seq,
        end_seq=end_seq,
        ended_s=ended_s,
        exit_code=exit_code,
        consumed=bool(consumed),
    )
