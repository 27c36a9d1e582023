"""Bound the journal in age and in size, a little at a time so that nobody waits long for the write lock."""

import sqlite3

MAX_DROPPED = 2_000
MAX_DROPPED_SAMPLES = 200
"""Groups of them, each as large as many records."""
VACUUM_PAGES = 2_000
_FORGET_SESSIONS = """DELETE FROM sessions WHERE consumed = 1 AND ended_s < ? AND NOT EXISTS
    (SELECT 1 FROM records WHERE key >= sessions.id << 40 AND key < (sessions.id + 1) << 40)"""

_DROP_SAMPLES = "DELETE FROM samples WHERE id IN (SELECT id FROM samples ORDER BY time_s LIMIT ?)"


def trim(connection: sqlite3.Connection, oldest_s: float, max_bytes: int) -> bool:
    """Drop records older than `oldest_s`, or the oldest ones of a file over `max_bytes`; True when more are due.

    Size means pages in use, so that a file full of free pages is not trimmed to nothing.
    """
    with connection:
        excess = used_bytes(connection) > max_bytes
        due = _drop_records(connection, oldest_s, excess=excess)
        if excess and not due:  # no records are left, as where no trainer has been for long
            due = connection.execute(_DROP_SAMPLES, (MAX_DROPPED_SAMPLES,)).rowcount > 0
        connection.execute("DELETE FROM samples WHERE time_s < ?", (oldest_s,))
        connection.execute(_FORGET_SESSIONS, (oldest_s,))
    connection.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
    return due


def _drop_records(connection: sqlite3.Connection, oldest_s: float, *, excess: bool) -> bool:
    oldest = _oldest_session(connection)
    if oldest is None or not (excess or oldest[2] < oldest_s):
        return False
    first_key, end_key, _ = oldest
    # Only a beginning of the session is dropped, even where the clock went back in the middle of it.
    newer = "SELECT key FROM records WHERE key >= ? AND key < ? AND time_s >= ? ORDER BY key LIMIT 1"
    kept = None if excess else connection.execute(newer, (first_key, end_key, oldest_s)).fetchone()
    dropped = connection.execute(
        "DELETE FROM records WHERE key IN (SELECT key FROM records WHERE key >= ? AND key < ? ORDER BY key LIMIT ?)",
        (first_key, kept[0] if kept else end_key, MAX_DROPPED),
    ).rowcount
    connection.execute(
        "UPDATE sessions SET first_seq = coalesce("
        "(SELECT min(key) - ? FROM records WHERE key >= ? AND key < ?), next_seq) WHERE id = ? >> 40",
        (first_key, first_key, end_key, first_key),
    )
    if excess:
        connection.execute(
            "DELETE FROM samples WHERE time_s < (SELECT MIN(time_s) FROM records WHERE key >= ?)", (first_key,)
        )
    return dropped > 0


def _oldest_session(connection: sqlite3.Connection) -> tuple[int, int, float] | None:
    """(first key, end key of the contiguous part, time of the first record) of the session with the oldest record."""
    found = []
    for first_key, end_key in connection.execute("SELECT id << 40, (id << 40) + next_seq FROM sessions").fetchall():
        row = connection.execute(
            "SELECT time_s FROM records WHERE key >= ? AND key < ? ORDER BY key LIMIT 1", (first_key, end_key)
        ).fetchone()
        if row is not None:
            found.append((first_key, end_key, row[0]))
    return min(found, key=lambda item: item[2], default=None)


def used_bytes(connection: sqlite3.Connection) -> int:
    """Size of the pages in use."""
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)
