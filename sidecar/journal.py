"""Everything the sidecar accepted, in one SQLite file: the queue between receiver and pipeline, and the past.

The receiver thread stores records under (session, seq) and moves each session's `next_seq`, before which every record
is stored or declared lost; the main thread reads up to there. Records are keyed by one integer, session number in the
high bits and seq in the low ones, so a session is a contiguous key range and reading it in order is a plain scan.
The receiver's counts are committed together with the records they count, so no kill can make them disagree.

WAL with synchronous=NORMAL: a commit survives kill -9 of the process; what a power cut takes is asked for again.
One connection writes and one reads, each behind its own lock, so no reader waits for a commit.

SQLite does not see all damage. So each record has a checksum: one that does not match is a loss, counted like others,
and costs nothing else. And a reader expects every record that is not known to be trimmed or lost: a hole is damage.

Without a path the journal is in memory. So the sidecar goes on while the disk is full or broken: the file keeps what it
has, the trainer keeps what is new, and a session begins with the oldest record that the trainer's ring still holds.
"""

import logging
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from shared.wire import Event, FrameError, Hello, Record, Snap, Step, decode_record
from sidecar.database import DamageError, connect, open_database, open_in_memory, open_read_only
from sidecar.journal_schema import (
    COUNT,
    MAX_SEQ,
    MIGRATIONS,
    SCHEMA,
    SCHEMA_VERSION,
    SELECT_SESSION,
    key_of,
    seq_of,
    session_of,
)
from sidecar.retention import trim
from sidecar.samples import Labels, Sample
from sidecar.stored import Batch, LostRange, StoredSession

DAMAGED = "damaged"
"""Reason of losing a record that is on the disk and not what was written."""
READ_BATCH = 500
_log = logging.getLogger(__name__)

Counts = Mapping[tuple[str, str], int]
R = TypeVar("R", Snap, Step, Event)
_KINDS: dict[type[Record], str] = {Snap: "snap", Step: "step", Event: "event"}


class Journal:
    """The file and its two connections. Every method may be called from any thread, and raises sqlite3.Error.

    Args:
        path: the file; None keeps everything in memory.
        counts: what a journal in memory goes on showing as the counts of the file; it counts nothing itself, so that
            none of them falls when the file takes over again. None when they are not known.
        read_only: look into the file of another process; damaged records are left out.

    Raises:
        DatabaseError: the file was written by a newer version, or cannot be opened.
    """

    def __init__(self, path: Path | None, counts: Counts | None = None, *, read_only: bool = False) -> None:
        self.is_on_disk = path is not None
        self._is_read_only = read_only
        self._file_counts = counts
        self._write_lock = threading.RLock()
        if path is None:
            # One connection for both: a second one would wait for the first one's table locks.
            self._writer = self._reader = open_in_memory(SCHEMA)
            self._read_lock = self._write_lock
        elif read_only:
            self._writer = self._reader = open_read_only(path, SCHEMA_VERSION)
            self._read_lock = self._write_lock
        else:
            self._writer = open_database(path, SCHEMA, SCHEMA_VERSION, MIGRATIONS)
            self._reader = connect(path)
            self._read_lock = threading.RLock()

    def close(self) -> None:
        """Commit and close both connections."""
        with self._write_lock, self._read_lock:
            self._reader.close()
            self._writer.close()

    def open_session(self, hello: Hello, body: bytes, endpoint: str, labels: Labels) -> StoredSession:
        """Store a session at its first hello, or refresh it (and reopen it if it had ended) at a later one."""
        first_seq = 0 if self.is_on_disk else hello.first_seq
        with self._write_lock, self._writer as connection:
            connection.execute(
                "INSERT INTO sessions (session, endpoint, labels, hello, first_seq, next_seq, end_seq) "
                "VALUES (?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (session) DO UPDATE SET hello = excluded.hello, endpoint = excluded.endpoint, "
                "end_seq = max(end_seq, excluded.end_seq), ended_s = NULL, exit_code = NULL, consumed = 0",
                (
                    hello.session,
                    endpoint,
                    msgspec.json.encode(labels).decode(),
                    body,
                    first_seq,
                    first_seq,
                    hello.next_seq,
                ),
            )
            rows = connection.execute(f"{SELECT_SESSION} WHERE session = ?", (hello.session,))
            return session_of(rows.fetchone())

    def mark_consumed(self, number: int) -> None:
        """Note that the pipeline has finished with an ended session."""
        with self._write_lock, self._writer as connection:
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
                "INSERT OR IGNORE INTO records VALUES (?, ?, ?, ?, ?)",
                [
                    (key_of(number, record.seq), record.time_s, _KINDS[type(record)], body, zlib.crc32(body))
                    for number, record, body in batch.records
                ],
            )
            connection.executemany(
                "UPDATE sessions SET next_seq = ?, end_seq = ? WHERE id = ?",
                [(*position, number) for number, position in batch.positions.items()],
            )
            connection.executemany("UPDATE sessions SET ended_s = ?, exit_code = ? WHERE id = ?", batch.ended)
            connection.executemany("INSERT INTO lost VALUES (?, ?, ?, ?)", map(msgspec.structs.astuple, batch.lost))
            connection.executemany(COUNT, [(*key, amount) for key, amount in batch.counts.items()])

    def held_seqs(self, number: int, first_seq: int) -> list[int]:
        """Sequence numbers of the stored records of a session from `first_seq` on."""
        with self._read_lock:
            bounds = (key_of(number, first_seq), key_of(number + 1, 0))
            rows = self._reader.execute("SELECT key FROM records WHERE key >= ? AND key < ?", bounds)
            return [seq_of(key) for (key,) in rows]

    def records(self, session: StoredSession, first_seq: int, end_seq: int) -> Iterator[Record]:
        """Yield the stored records of [first_seq, end_seq) in order; lost ones are simply not there."""
        key, end, expected = key_of(session.number, first_seq), key_of(session.number, end_seq), first_seq
        while True:
            with self._read_lock:
                rows = self._reader.execute(
                    "SELECT key, body, crc FROM records WHERE key >= ? AND key < ? ORDER BY key LIMIT ?",
                    (key, end, READ_BATCH),
                ).fetchall()
            for found, body, crc in rows:
                seq = seq_of(found)
                if seq != expected:
                    self._account_for(session, expected, seq)
                expected = seq + 1
                if (record := self._checked(session, found, body, crc)) is not None:
                    yield record
            if len(rows) < READ_BATCH:
                break
            key = rows[-1][0] + 1
        if expected < end_seq:
            self._account_for(session, expected, end_seq)

    def newest(self, session: StoredSession, kind: type[R]) -> Iterator[R]:
        """Yield the readable records of one kind, newest first."""
        # The kind is spelt out because only then does SQLite use the index on events.
        query = (
            f"SELECT key, body, crc FROM records WHERE key >= ? AND key < ? AND kind = '{_KINDS[kind]}' "  # noqa: S608 - own word
            "ORDER BY key DESC LIMIT 1"
        )
        first_key, end_key = key_of(session.number, 0), key_of(session.number, session.next_seq)
        while (row := self._one(query, (first_key, end_key))) is not None:
            end_key, body, crc = row
            record = self._checked(session, end_key, body, crc)
            if isinstance(record, kind):
                yield record

    def first_seq_since(self, session: StoredSession, time_s: float) -> int:
        """Sequence number of about the first record at or after a time; `next_seq` when there is none.

        Records are close to ordered in time, so this bisects over seq instead of keeping an index.
        """
        low, high = 0, session.next_seq
        while low < high:
            middle = (low + high) // 2
            found_s = self._time_s(key_of(session.number, middle), key_of(session.number, high), "ASC")
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
        return self._time_s(key_of(number, 0), key_of(number, seq), "DESC")

    def time_from_s(self, number: int, seq: int) -> float | None:
        """Time of the oldest stored record of a session from `seq` on."""
        return self._time_s(key_of(number, seq), key_of(number + 1, 0), "ASC")

    def counts(self) -> Counts | None:
        """All committed counts by (name, label); None when they are in a file that cannot be read."""
        if not self.is_on_disk:
            return self._file_counts
        with self._read_lock:
            return {(name, label): value for name, label, value in self._reader.execute("SELECT * FROM counts")}

    def count(self, name: str, label: str) -> None:
        """Add one to a count."""
        self.append(Batch(counts={(name, label): 1}))

    def lost_ranges(self) -> list[LostRange]:
        """Every range that was declared lost, oldest first."""
        with self._read_lock:
            return [LostRange(*row) for row in self._reader.execute("SELECT * FROM lost ORDER BY rowid")]

    def append_samples(self, samples: Sequence[Sample]) -> None:
        """Store collector samples that were taken together."""
        if samples:
            body = zlib.compress(msgspec.msgpack.encode(samples), 1)
            with self._write_lock, self._writer as connection:
                connection.execute("INSERT INTO samples (time_s, body) VALUES (?, ?)", (samples[0].time_s, body))

    def samples_between(self, start_s: float, end_s: float) -> Iterator[Sample]:
        """Yield collector samples of groups taken in [start_s, end_s), in order of time."""
        with self._read_lock:
            rows = self._reader.execute(
                "SELECT body FROM samples WHERE time_s >= ? AND time_s < ? ORDER BY time_s", (start_s, end_s)
            ).fetchall()
        for (body,) in rows:
            try:
                yield from msgspec.msgpack.decode(zlib.decompress(body), type=list[Sample])
            except (zlib.error, msgspec.DecodeError):
                _log.error("readings of the collectors are damaged in the journal and left out")

    def trim(self, oldest_s: float, max_bytes: int) -> bool:
        """Drop what is over the bounds (`sidecar.retention`); True when more is due."""
        with self._write_lock:
            return trim(self._writer, oldest_s, max_bytes)

    def _checked(self, session: StoredSession, key: int, body: bytes, crc: int | None) -> Record | None:
        """The record, or None for one that is damaged, which is a loss from then on."""
        try:
            if crc is None or crc == zlib.crc32(body):
                return decode_record(body)
        except FrameError as error:
            _log.debug("a record does not decode: %s", error)
        if self._is_read_only:
            return None
        seq = seq_of(key)
        _log.error("lost record %d of session %s: it is damaged in the journal", seq, session.name)
        with self._write_lock, self._writer as connection:
            connection.execute("DELETE FROM records WHERE key = ?", (key,))
            connection.execute("INSERT INTO lost VALUES (?, ?, ?, ?)", (session.name, seq, seq + 1, DAMAGED))
            connection.execute(COUNT, ("lost", DAMAGED, 1))
        return None

    def _account_for(self, session: StoredSession, first_seq: int, end_seq: int) -> None:
        """Raise DamageError unless all of [first_seq, end_seq) was trimmed or declared lost."""
        with self._read_lock:
            row = self._reader.execute("SELECT first_seq FROM sessions WHERE id = ?", (session.number,)).fetchone()
            query = "SELECT first_seq, end_seq FROM lost WHERE session = ? ORDER BY first_seq"
            ranges = self._reader.execute(query, (session.name,)).fetchall()
        reached = max(first_seq, row[0] if row else end_seq)
        for first, end in ranges:
            if first <= reached:
                reached = max(reached, end)
        if reached < end_seq:
            raise DamageError(f"records {reached} to {end_seq - 1} of session {session.name} are gone")

    def _sessions(self, where: str) -> list[StoredSession]:
        with self._read_lock:
            return [session_of(row) for row in self._reader.execute(f"{SELECT_SESSION} {where} ORDER BY id")]

    def _time_s(self, key: int, end_key: int, order: Literal["ASC", "DESC"]) -> float | None:
        query = f"SELECT time_s FROM records WHERE key >= ? AND key < ? ORDER BY key {order} LIMIT 1"  # noqa: S608 - two words
        row = self._one(query, (key, end_key))
        return None if row is None else row[0]

    def _one(self, query: str, parameters: tuple[int, int]) -> tuple[Any, ...] | None:
        with self._read_lock:
            row: tuple[Any, ...] | None = self._reader.execute(query, parameters).fetchone()
        return row
