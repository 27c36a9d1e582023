"""The tables of the journal, how older ones become these, and the keys of its records.

`sessions.first_seq` is where a session begins after trimming; records below `next_seq` are stored or in `lost`.
"""

import msgspec

from shared.wire import FrameError, Hello, decode
from sidecar.database import DamageError
from sidecar.samples import Labels
from sidecar.stored import StoredSession

SCHEMA_VERSION = 2
SEQ_BITS = 40
MAX_SEQ = 1 << SEQ_BITS
SCHEMA = """
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY, session TEXT NOT NULL UNIQUE, endpoint TEXT NOT NULL, labels TEXT NOT NULL,
    hello BLOB NOT NULL, next_seq INTEGER NOT NULL DEFAULT 0, end_seq INTEGER NOT NULL DEFAULT 0, ended_s REAL,
    exit_code INTEGER,
    consumed INTEGER NOT NULL DEFAULT 0, first_seq INTEGER NOT NULL DEFAULT 0);
CREATE TABLE records (
    key INTEGER PRIMARY KEY, time_s REAL NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL, crc INTEGER);
CREATE INDEX events ON records (key) WHERE kind = 'event';
CREATE TABLE lost (session TEXT NOT NULL, first_seq INTEGER NOT NULL, end_seq INTEGER NOT NULL, reason TEXT NOT NULL);
CREATE TABLE samples (id INTEGER PRIMARY KEY, time_s REAL NOT NULL, body BLOB NOT NULL);
CREATE INDEX samples_time ON samples (time_s);
CREATE TABLE counts (name TEXT NOT NULL, label TEXT NOT NULL, value INTEGER NOT NULL, PRIMARY KEY (name, label));
"""
MIGRATIONS = {
    1: "ALTER TABLE records ADD COLUMN crc INTEGER; "
    "ALTER TABLE sessions ADD COLUMN first_seq INTEGER NOT NULL DEFAULT 0; "
    "UPDATE sessions SET first_seq = coalesce((SELECT min(key) - (sessions.id << 40) FROM records "
    "WHERE key >= sessions.id << 40 AND key < (sessions.id + 1) << 40), next_seq)"
}
"""From a version to the next one. Records of version 1 have no checksum and are believed."""

COUNT = "INSERT INTO counts VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET value = value + excluded.value"
SELECT_SESSION = "SELECT id, hello, endpoint, labels, next_seq, end_seq, ended_s, exit_code, consumed FROM sessions"


def key_of(number: int, seq: int) -> int:
    """The key of a record: session number, then sequence number."""
    return (number << SEQ_BITS) + seq


def seq_of(key: int) -> int:
    """The sequence number in a key."""
    return key & (MAX_SEQ - 1)


def session_of(row: tuple[int, bytes, str, str, int, int, float | None, int | None, int]) -> StoredSession:
    """Read what SELECT_SESSION found; raises DamageError when it does not decode."""
    number, body, endpoint, labels, next_seq, end_seq, ended_s, exit_code, consumed = row
    try:
        hello, pairs = decode(body), msgspec.json.decode(labels, type=Labels)
    except (FrameError, msgspec.DecodeError) as error:
        raise DamageError(f"session {number} does not decode: {error}") from error
    assert isinstance(hello, Hello)
    return StoredSession(
        number=number,
        hello=hello,
        endpoint=endpoint,
        labels=pairs,
        next_seq=next_seq,
        end_seq=end_seq,
        ended_s=ended_s,
        exit_code=exit_code,
        consumed=bool(consumed),
    )
