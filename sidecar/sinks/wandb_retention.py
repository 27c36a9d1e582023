"""Bound the spool: rows of closed runs by age, everything by size, a little at a time."""

import logging
import sqlite3

from sidecar.retention import VACUUM_PAGES, used_bytes

MAX_DROPPED = 2_000
_LOG = logging.getLogger(__name__)
_CLOSED = "SELECT run_id, num_rows FROM runs WHERE closed_s < ? ORDER BY closed_s"
_CONFIRMED = """SELECT run_id, num_confirmed FROM runs JOIN uploads USING (run_id)
    WHERE closed_s IS NULL AND number < ? ORDER BY number"""
_WAITING = "SELECT run_id, num_rows FROM runs WHERE closed_s IS NULL AND number < ? ORDER BY number"
_ALL = 9e99


def trim(connection: sqlite3.Connection, closed_before_s: float, max_bytes: int) -> bool:
    """Drop what may go, at most `MAX_DROPPED` rows of it; True when more is due.

    Over `max_bytes`, first what W&B has goes: rows of closed runs, then confirmed rows of others. Only then the oldest
    rows that still wait, which are counted, because they are lost to W&B.
    """
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        dropped = _drop(connection, _CLOSED, closed_before_s)
        if not dropped and used_bytes(connection) > max_bytes:
            dropped = _drop(connection, _CLOSED, _ALL) or _drop(connection, _CONFIRMED, _ALL)
            if not dropped and (dropped := _drop(connection, _WAITING, _ALL)):
                connection.execute("UPDATE facts SET value = value + ? WHERE name = 'dropped'", (dropped,))
                _LOG.error("the W&B spool is full (%d bytes): dropped the %d oldest rows that wait", max_bytes, dropped)
    connection.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
    return dropped > 0


def _drop(connection: sqlite3.Connection, bounds: str, before: float) -> int:
    """Delete the first rows of the first run that has any below its bound."""
    for run_id, end in connection.execute(bounds, (before,)).fetchall():
        dropped = connection.execute(
            "DELETE FROM rows WHERE run_id = ? AND row_index IN (SELECT row_index FROM rows "
            "WHERE run_id = ? AND row_index < ? ORDER BY row_index LIMIT ?)",
            (run_id, run_id, end, MAX_DROPPED),
        ).rowcount
        if dropped:
            return dropped
    return 0
