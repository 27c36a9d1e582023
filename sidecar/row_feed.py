"""Rows of one session into the W&B spool, each exactly once.

Rows are a pure function of the ordered records, and the spool commits them together with the cursor of the last record
they came from. So whatever interrupts this, going on from the spool's cursor neither loses nor repeats a row.
"""

import logging
import sqlite3
from collections.abc import Callable, Mapping

from sidecar.journal import Journal, StoredSession
from sidecar.sinks.wandb_rows import RowBuilder
from sidecar.sinks.wandb_spool import Row, Spool

ROWS_PER_COMMIT = 500
CRASHED = 1
"""Exit code of a trainer that left without saying one."""
Evaluate = Callable[[str, float], Mapping[str, float]]
_log = logging.getLogger(__name__)


class RowFeed:
    """Turns records of one session into rows of the spool.

    Args:
        stored: the session.
        journal: where its records are.
        spool: where rows go.
        builder: makes rows of a record.
        evaluate: values of the definitions by W&B key, for "step" or "tick", at a time.
    """

    def __init__(
        self, stored: StoredSession, journal: Journal, spool: Spool, builder: RowBuilder, evaluate: Evaluate
    ) -> None:
        self._stored = stored
        self._journal = journal
        self._spool = spool
        self._builder = builder
        self._evaluate = evaluate
        self._cursor = spool.cursor(stored.name)
        self._is_failing = False

    @property
    def next_seq(self) -> int:
        """The record that comes next."""
        return self._cursor.seq + 1

    def catch_up(self, end_seq: int) -> None:
        """Make rows of every record before `end_seq`; when the spool cannot be written, the next call tries again."""
        cursor, rows = self._cursor, list[Row]()
        try:
            for record in self._journal.records(self._stored, cursor.seq + 1, end_seq):
                new, cursor = self._builder.rows_for(record, self._stored.hello, self._evaluate, cursor)
                rows += new
                if len(rows) >= ROWS_PER_COMMIT:
                    self._spool.append(self._stored.hello.run_id, self._stored.name, cursor, rows)
                    self._cursor, rows = cursor, []
            if rows:
                self._spool.append(self._stored.hello.run_id, self._stored.name, cursor, rows)
            self._cursor = cursor
        except sqlite3.OperationalError as error:
            if not self._is_failing:
                _log.error("cannot write the W&B spool (%s): rows wait in the journal meanwhile", error)
            self._is_failing = True
        else:
            if self._is_failing:
                _log.info("the W&B spool can be written again")
            self._is_failing = False

    def finish(self, exit_code: int | None) -> bool:
        """Tell the spool that the session ended; False when it has to be told again."""
        try:
            self._spool.finish(
                self._stored.hello.run_id, self._stored.name, CRASHED if exit_code is None else exit_code
            )
        except sqlite3.OperationalError:
            return False
        return not self._is_failing
