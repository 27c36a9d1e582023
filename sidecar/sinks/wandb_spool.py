"""Rows on their way to W&B, on disk, numbered densely from 0 per run.

The number of a row is decided once, here, and becomes W&B's own step (plus the run's `base_step`), which is what makes
every later restart exact: whoever uploads asks the server how many rows it has and goes on from that number. Rows are
committed together with the cursor of the record they came from, so a kill between records and rows cannot happen.

One process writes (the daemon or `push`); the uploading child reads. Rows of a run stay until it is closed on the
server and old enough to be pruned, or until the spool is full (`wandb_retention`).
"""

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from shared.wire import Hello
from sidecar.database import is_corruption, open_database
from sidecar.sinks.wandb_retention import trim
from sidecar.sinks.wandb_run import RECORD_KEY, STEP_AXIS, Cursor, Row, SessionProgress, SpooledRun, run_config

SCHEMA_VERSION = 2

_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    run_id TEXT PRIMARY KEY, number INTEGER NOT NULL UNIQUE, start_time_s REAL NOT NULL, config TEXT NOT NULL,
    base_step INTEGER, num_rows INTEGER NOT NULL DEFAULT 0, num_sent INTEGER NOT NULL DEFAULT 0, closed_s REAL
);
CREATE TABLE IF NOT EXISTS sessions (
    number INTEGER PRIMARY KEY, session TEXT NOT NULL UNIQUE, run_id TEXT NOT NULL,
    seq INTEGER NOT NULL DEFAULT -1, last_telemetry_time_s REAL NOT NULL DEFAULT -9e999, exit_code INTEGER
);
CREATE INDEX IF NOT EXISTS sessions_of_run ON sessions (run_id);
CREATE TABLE IF NOT EXISTS rows (
    run_id TEXT NOT NULL, row_index INTEGER NOT NULL, body TEXT NOT NULL, PRIMARY KEY (run_id, row_index)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS keys (run_id TEXT NOT NULL, key TEXT NOT NULL, PRIMARY KEY (run_id, key)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS uploads (
    run_id TEXT PRIMARY KEY, num_confirmed INTEGER NOT NULL DEFAULT 0, num_lines INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value);
INSERT OR IGNORE INTO facts VALUES ('dropped', 0);
"""
_VERSION_2 = """
ALTER TABLE keys ADD COLUMN is_of_steps INTEGER NOT NULL DEFAULT 0;
UPDATE keys SET is_of_steps = key LIKE 'train/%';
CREATE TABLE adopted (session TEXT NOT NULL, key TEXT NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY (session, key));
CREATE TABLE backfilled (
    session TEXT NOT NULL, key TEXT NOT NULL, seq INTEGER NOT NULL, last_telemetry_time_s REAL NOT NULL,
    PRIMARY KEY (session, key));
"""
_RUNS = """
SELECT run_id, num_rows, num_sent, base_step, coalesce(num_confirmed, 0), coalesce(num_lines, 0),
    CASE WHEN NOT EXISTS (SELECT 1 FROM sessions WHERE sessions.run_id = runs.run_id AND exit_code IS NULL)
    THEN (SELECT exit_code FROM sessions WHERE sessions.run_id = runs.run_id ORDER BY number DESC LIMIT 1) END,
    closed_s IS NOT NULL
FROM runs LEFT JOIN uploads USING (run_id)
"""


class SpoolFailedError(Exception):
    """The spool cannot be used now."""


@contextmanager
def spooling(report_damage: Callable[[], None]) -> Iterator[None]:
    """What may fail because of the spool alone: damage is reported, a full disk passes.

    Raises:
        SpoolFailedError: in either case.
    """
    try:
        yield
    except sqlite3.DatabaseError as error:
        if is_corruption(error):
            report_damage()
        elif not isinstance(error, sqlite3.OperationalError):
            raise
        raise SpoolFailedError(str(error)) from error


class Spool:
    """The spool file. One thread only.

    Args:
        path: the file; made when it is missing, unless `read_only`.
        read_only: for the uploading child: never takes a lock that could hold up the writer.

    Raises:
        DatabaseError: written by a newer version, or not to be opened. A damaged file is moved aside and begun anew.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        if read_only:
            self._connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)
            self._connection.isolation_level = None
            return
        self._connection = open_database(path, _SCHEMA + _VERSION_2, SCHEMA_VERSION, {1: _VERSION_2})
        self._connection.isolation_level = None

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def open_run(self, hello: Hello) -> float:
        """Register a session and its run; returns the start of the run's first session in Unix seconds."""
        with self._transaction():
            self._ensure_run(hello.run_id, hello.start_time_s)
            if hello.rank == 0:
                self._execute(
                    "UPDATE runs SET config = ? WHERE run_id = ?", json.dumps(run_config(hello)), hello.run_id
                )
                self._ensure_session(hello.run_id, hello.session)
                # One that was thought to be over and came back is not over.
                self._execute("UPDATE sessions SET exit_code = NULL WHERE session = ?", hello.session)
        return self.run_start_s(hello.run_id)

    def run_start_s(self, run_id: str) -> float:
        """Start of a run's first session in Unix seconds; the run must exist."""
        return float(self._one("SELECT start_time_s FROM runs WHERE run_id = ?", run_id)[0])

    def cursor(self, session: str) -> Cursor:
        """Where the rows of a session end."""
        row = self._execute("SELECT seq, last_telemetry_time_s FROM sessions WHERE session = ?", session).fetchone()
        return Cursor(*row) if row else Cursor()

    def append(self, run_id: str, session: str, cursor: Cursor, rows: Sequence[Row]) -> None:
        """Store rows under the next numbers of the run together with the session's cursor, all or nothing."""
        with self._transaction():
            self._ensure_run(run_id, time.time())
            self._ensure_session(run_id, session)
            self._add(run_id, rows)
            self._execute("UPDATE sessions SET seq = ?, last_telemetry_time_s = ? WHERE session = ?", *cursor, session)

    def adopt(self, session: str, keys: Iterable[str], seq: int) -> None:
        """Note that rows of records after `seq` have these keys; only the first time counts."""
        rows = [(session, key, seq) for key in keys]
        with self._transaction():
            self._connection.executemany("INSERT OR IGNORE INTO adopted VALUES (?, ?, ?)", rows)

    def adopted_after(self, session: str, key: str) -> int:
        """The last record whose row had no chance to have a key: all of them so far if it was never adopted."""
        row = self._execute("SELECT seq FROM adopted WHERE session = ? AND key = ?", session, key).fetchone()
        return int(row[0]) if row else self.cursor(session).seq

    def backfill_cursor(self, session: str, key: str) -> Cursor:
        """How far a key has been filled in."""
        query = "SELECT seq, last_telemetry_time_s FROM backfilled WHERE session = ? AND key = ?"
        row = self._execute(query, session, key).fetchone()
        return Cursor(*row) if row else Cursor()

    def add_backfill(self, run_id: str, rows: Sequence[Row], cursors: Mapping[tuple[str, str], Cursor]) -> None:
        """Append rows about the past of a run together with how far (session, key) is filled in, all or nothing.

        They name the newest record of the run, because whoever looks for the place of a row goes by that.
        """
        with self._transaction():
            query = "SELECT session, seq FROM sessions WHERE run_id = ? AND seq >= 0 ORDER BY number DESC LIMIT 1"
            session, seq = self._one(query, run_id)
            self._add(run_id, [row | {RECORD_KEY: f"{session}:{seq}"} for row in rows])
            filled = [(*key, *cursor) for key, cursor in cursors.items()]
            self._connection.executemany("INSERT OR REPLACE INTO backfilled VALUES (?, ?, ?, ?)", filled)

    def _add(self, run_id: str, rows: Sequence[Row]) -> None:
        first = int(self._one("SELECT num_rows FROM runs WHERE run_id = ?", run_id)[0])
        self._connection.executemany(
            "INSERT INTO rows VALUES (?, ?, ?)",
            [(run_id, first + i, json.dumps(row, separators=(",", ":"))) for i, row in enumerate(rows)],
        )
        keys = {(key, STEP_AXIS in row) for row in rows for key in row if not key.startswith("_")}
        self._connection.executemany("INSERT OR IGNORE INTO keys VALUES (?, ?, ?)", [(run_id, *key) for key in keys])
        self._execute("UPDATE runs SET num_rows = ? WHERE run_id = ?", first + len(rows), run_id)
        if rows:
            self._execute("UPDATE runs SET closed_s = NULL WHERE run_id = ?", run_id)

    def finish(self, run_id: str, session: str, exit_code: int) -> None:
        """Note that a session ended; once all sessions of its run have, the run is closed on the server."""
        self._execute("UPDATE sessions SET exit_code = ? WHERE session = ? AND run_id = ?", exit_code, session, run_id)

    def session_progress(self, run_id: str, session: str) -> SessionProgress | None:
        """How far a session of a run has become rows; None when it is not known."""
        row = self._execute(
            "SELECT seq, exit_code IS NOT NULL FROM sessions WHERE session = ? AND run_id = ?", session, run_id
        ).fetchone()
        return SessionProgress(row[0], bool(row[1])) if row else None

    def row_of_record(self, run_id: str, session: str, seq: int) -> int:
        """Number of the last row that came from a record of a session or from an earlier one, -1 for none."""
        numbers = dict(self._execute("SELECT session, number FROM sessions WHERE run_id = ?", run_id).fetchall())
        query = "SELECT row_index, body FROM rows WHERE run_id = ? ORDER BY row_index DESC"
        for index, body in self._execute(query, run_id):
            found, _, found_seq = str(json.loads(body).get(RECORD_KEY, ":-1")).rpartition(":")
            if (numbers.get(found, -1), int(found_seq)) <= (numbers[session], seq):
                return int(index)
        return -1

    def first_row(self, run_id: str) -> int:
        """Number of the first row that was not dropped."""
        found = self._one("SELECT min(row_index) FROM rows WHERE run_id = ?", run_id)[0]
        return self.num_rows(run_id) if found is None else int(found)

    def rows(self, run_id: str, first: int, limit: int) -> list[tuple[int, Row]]:
        """At most `limit` rows from number `first` on, in order."""
        query = "SELECT row_index, body FROM rows WHERE run_id = ? AND row_index >= ? ORDER BY row_index LIMIT ?"
        found = self._execute(query, run_id, first, limit)
        return [(index, json.loads(body)) for index, body in found]

    def num_rows(self, run_id: str) -> int:
        """How many rows a run has had so far."""
        row = self._execute("SELECT num_rows FROM runs WHERE run_id = ?", run_id).fetchone()
        return row[0] if row else 0

    def runs(self) -> list[SpooledRun]:
        """All runs, the newest first."""
        return [_run(row) for row in self._execute(f"{_RUNS} ORDER BY number DESC")]

    def open_runs(self) -> list[SpooledRun]:
        """Runs that are not closed on the server, the newest first."""
        return [_run(row) for row in self._execute(f"{_RUNS} WHERE closed_s IS NULL ORDER BY number DESC")]

    def run(self, run_id: str) -> SpooledRun:
        """One run; it must exist."""
        return _run(self._one(f"{_RUNS} WHERE run_id = ?", run_id))

    def config(self, run_id: str) -> dict[str, object]:
        """What goes to W&B as the configuration of a run."""
        config: dict[str, object] = json.loads(self._one("SELECT config FROM runs WHERE run_id = ?", run_id)[0])
        return config

    def keys(self, run_id: str) -> dict[str, bool]:
        """Every key that any row of a run has had, sorted, and whether it came with a training step."""
        query = "SELECT key, is_of_steps FROM keys WHERE run_id = ? ORDER BY key"
        return {key: bool(is_of_steps) for key, is_of_steps in self._execute(query, run_id)}

    def set_base_step(self, run_id: str, step: int) -> None:
        """Note which W&B step the row number 0 of a run has."""
        self._execute("UPDATE runs SET base_step = ? WHERE run_id = ?", step, run_id)

    def set_sent(self, run_id: str, num_sent: int) -> None:
        """Note how many rows were handed to W&B."""
        self._execute("UPDATE runs SET num_sent = ? WHERE run_id = ?", num_sent, run_id)

    def set_confirmed(self, run_id: str, num_confirmed: int, num_lines: int) -> None:
        """Note what the server was seen to have."""
        self._execute("INSERT OR REPLACE INTO uploads VALUES (?, ?, ?)", run_id, num_confirmed, num_lines)

    def set_closed(self, run_id: str, time_s: float) -> None:
        """Note that the server has all rows of a run and its exit code."""
        self._execute("UPDATE runs SET closed_s = ? WHERE run_id = ?", time_s, run_id)

    def trim(self, closed_before_s: float, max_bytes: int) -> bool:
        """Bound the file (`wandb_retention.trim`); numbers and cursors stay, should a run be resumed."""
        return trim(self._connection, closed_before_s, max_bytes)

    @property
    def num_dropped(self) -> int:
        """Rows that were dropped before W&B was seen to have them."""
        return int(self._one("SELECT value FROM facts WHERE name = ?", "dropped")[0])

    def count_dropped(self, num: int) -> None:
        """Count rows that W&B will never get."""
        self._execute("UPDATE facts SET value = value + ? WHERE name = 'dropped'", num)

    def _ensure_run(self, run_id: str, start_time_s: float) -> None:
        self._execute(
            "INSERT OR IGNORE INTO runs (run_id, number, start_time_s, config) "
            "SELECT ?, coalesce(max(number), 0) + 1, ?, '{}' FROM runs",
            run_id,
            start_time_s,
        )

    def _ensure_session(self, run_id: str, session: str) -> None:
        if self._execute("SELECT 1 FROM sessions WHERE session = ?", session).fetchone() is None:
            self._execute("INSERT INTO sessions (session, run_id) VALUES (?, ?)", session, run_id)
            self._execute("UPDATE runs SET closed_s = NULL WHERE run_id = ?", run_id)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._connection:  # commits at the end, or rolls back when something raises
            self._connection.execute("BEGIN IMMEDIATE")
            yield

    def _execute(self, statement: str, *parameters: str | float | None) -> sqlite3.Cursor:
        return self._connection.execute(statement, parameters)

    def _one(self, statement: str, run_id: str) -> tuple[Any, ...]:
        row = self._execute(statement, run_id).fetchone()
        assert row is not None, f"the spool has no {run_id}"
        return tuple(row)


def _run(row: tuple[Any, ...]) -> SpooledRun:
    names = ("run_id", "num_rows", "num_sent", "base_step", "num_confirmed", "num_lines", "exit_code", "closed")
    return msgspec.convert(dict(zip(names, row, strict=True)), SpooledRun, strict=False)
