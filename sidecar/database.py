"""Open an SQLite file that one process owns: its version checked, damage moved aside, nothing lost in silence.

Damage is often found only while running, on a page that nothing read at start. Then `mark_damaged` leaves a marker
beside the file, the process gives up, and the next start moves the file aside.
"""

import logging
import sqlite3
import time
from pathlib import Path

_CORRUPT = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_log = logging.getLogger(__name__)


class DatabaseError(ValueError):
    """A file that cannot be used; the message is meant for the user."""


def open_database(path: Path, schema: str, version: int) -> sqlite3.Connection:
    """Open for writing, and create the tables of a new file; a damaged file is moved aside and begun anew.

    Raises:
        DatabaseError: written by a newer version (nothing is touched), or not to be opened.
    """
    if _marker(path).exists():
        _move_aside(path, "found while running")
        _marker(path).unlink()
    try:
        return _open(path, schema, version)
    except sqlite3.DatabaseError as error:
        if not is_corruption(error):
            raise DatabaseError(f"{path}: {error}; give another --state-dir") from error
        _move_aside(path, str(error))
        return _open(path, schema, version)


def connect(path: Path) -> sqlite3.Connection:
    """One more connection to an opened file, usable from any thread that holds its lock."""
    connection = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def is_corruption(error: sqlite3.Error) -> bool:
    """Whether the file is damaged, rather than the disk full or the file busy."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _CORRUPT


def mark_damaged(path: Path) -> None:
    """Ask the next `open_database` to move this file aside."""
    _marker(path).touch()


def _open(path: Path, schema: str, version: int) -> sqlite3.Connection:
    connection = connect(path)
    try:
        if _version(connection, path, newest=version) == 0:
            connection.executescript(
                "PRAGMA auto_vacuum = INCREMENTAL; PRAGMA journal_mode = WAL;"
                f"BEGIN; {schema}; PRAGMA user_version = {version}; COMMIT;"
            )
        # Reads one page of every table: a torn file shows here rather than an hour later.
        for table, sql in connection.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'table'").fetchall():
            order = "" if sql.rstrip().endswith("WITHOUT ROWID") else "ORDER BY rowid DESC"
            connection.execute(f'SELECT * FROM "{table}" {order} LIMIT 1').fetchone()  # noqa: S608 - own name
    except (DatabaseError, sqlite3.Error):
        connection.close()
        raise
    return connection


def _version(connection: sqlite3.Connection, path: Path, newest: int) -> int:
    found: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if found > newest:
        raise DatabaseError(
            f"{path} has version {found}, this sidecar knows {newest}: it was written by a newer one; "
            "upgrade, or give another --state-dir"
        )
    return found


def _marker(path: Path) -> Path:
    return path.with_name(path.name + ".damaged")


def _move_aside(path: Path, why: str) -> None:
    """Keep a damaged file for inspection under another name, with its log, and make room for a new one."""
    aside = f"{path.name}.corrupt-{time.strftime('%Y%m%dT%H%M%S')}"
    for suffix in ("", "-wal", "-shm"):
        source = path.with_name(path.name + suffix)
        if source.exists():
            source.rename(path.with_name(aside + suffix))
    _log.error("%s is damaged (%s): moved to %s, starting a new one", path, why, aside)
