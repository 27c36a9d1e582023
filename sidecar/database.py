"""Open an SQLite file that one process owns: its version checked, damage moved aside, nothing lost in silence.

Damage is often found only while running, on a page that nothing read at start. Then `mark_damaged` leaves a marker
beside the file, the process gives up, and the next start moves the file aside.
"""

import contextlib
import logging
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path

_CORRUPT = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_log = logging.getLogger(__name__)


class DatabaseError(ValueError):
    """A file that cannot be used; the message is meant for the user."""


class NewerVersionError(DatabaseError):
    """A file written by a newer version, which nothing but that version must touch."""


class DamageError(sqlite3.DatabaseError):
    """Content that cannot be what was written, found where SQLite itself found nothing."""


def open_database(
    path: Path, schema: str, version: int, migrations: Mapping[int, str] | None = None
) -> sqlite3.Connection:
    """Open for writing, and create the tables of a new file; a damaged file is moved aside and begun anew.

    Args:
        path: the file.
        schema: makes the tables of `version`.
        version: what this program knows.
        migrations: statements that bring a file from a version to the next one, all or nothing.

    Raises:
        NewerVersionError: written by a newer version; nothing was touched.
        DatabaseError: not to be opened, written or moved.
    """
    migrations = migrations or {}
    try:
        if _marker(path).exists():
            _move_aside(path, "found while running")
            _marker(path).unlink()
        try:
            return _open(path, schema, version, migrations)
        except sqlite3.DatabaseError as error:
            if not is_corruption(error):
                raise
            _move_aside(path, str(error))
            return _open(path, schema, version, migrations)
    except sqlite3.DatabaseError as error:
        raise DatabaseError(f"{path}: {error}; give another --state-dir") from error
    except OSError as error:
        raise DatabaseError(f"{path}: {error.strerror}; give another --state-dir") from error


def open_read_only(path: Path, version: int) -> sqlite3.Connection:
    """Look into a file that another process may be writing, usable from any thread that holds its lock.

    Raises:
        DatabaseError: it is not there, cannot be read, or has another version.
    """
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro"
        connection = sqlite3.connect(uri, uri=True, timeout=5.0, check_same_thread=False)
        found = _version(connection, path, newest=version)
    except sqlite3.Error as error:
        raise DatabaseError(
            f"{path}: {error}; is this the state directory of a sidecar? say so with --state-dir"
        ) from error
    if found < version:
        raise DatabaseError(
            f"{path} has version {found}, not {version}: start the sidecar once, it brings it up to date"
        )
    return connection


def open_in_memory(schema: str) -> sqlite3.Connection:
    """The same tables in memory, usable from any thread that holds its lock."""
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    connection.executescript(schema)
    return connection


def connect(path: Path) -> sqlite3.Connection:
    """One more connection to an opened file, usable from any thread that holds its lock."""
    connection = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def is_corruption(error: sqlite3.Error | DatabaseError) -> bool:
    """Whether the file is damaged, rather than the disk full or the file busy."""
    return isinstance(error, DamageError) or getattr(error, "sqlite_errorcode", 0) & 0xFF in _CORRUPT


def mark_damaged(path: Path) -> None:
    """Ask the next `open_database` to move this file aside; a disk that takes no marker will show the damage again."""
    with contextlib.suppress(OSError):
        _marker(path).touch()


def _open(path: Path, schema: str, version: int, migrations: Mapping[int, str]) -> sqlite3.Connection:
    connection = connect(path)
    try:
        found = _version(connection, path, newest=version)
        if found == 0:
            connection.executescript(
                "PRAGMA auto_vacuum = INCREMENTAL; PRAGMA journal_mode = WAL;"
                f"BEGIN; {schema}; PRAGMA user_version = {version}; COMMIT;"
            )
        elif found < version:
            steps = "; ".join(migrations[step] for step in range(found, version))
            connection.executescript(f"BEGIN; {steps}; PRAGMA user_version = {version}; COMMIT;")
            _log.info("%s brought from version %d to %d", path, found, version)
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
        raise NewerVersionError(
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
