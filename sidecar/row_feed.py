"""Rows of one session into the W&B spool, each exactly once.

Rows are a pure function of the ordered records, and the spool commits them together with the cursor of the last record
they came from. So whatever interrupts this, going on from the spool's cursor neither loses nor repeats a row.
"""

import logging
from collections.abc import Callable, Sequence

from sidecar.journal import Journal
from sidecar.sinks.wandb_rows import Evaluate, RowBuilder
from sidecar.sinks.wandb_run import RECORD_KEY, Row
from sidecar.sinks.wandb_spool import Spool, SpoolFailedError, spooling
from sidecar.stored import StoredSession

ROWS_PER_COMMIT = 500
CRASHED = 1
"""Exit code of a trainer that left without saying one."""
_log = logging.getLogger(__name__)


class RowFeed:
    """Turns records of one session into rows of the spool.

    Args:
        stored: the session.
        journal: where its records are.
        spool: where rows go.
        interval_s: least time between telemetry rows.
        evaluate: values of the definitions.
        report_damage: called when the spool turns out to be damaged.
    """

    def __init__(
        self,
        stored: StoredSession,
        journal: Journal,
        spool: Spool,
        interval_s: float,
        evaluate: Evaluate,
        report_damage: Callable[[], None],
    ) -> None:
        self._stored = stored
        self._journal = journal
        self._spool = spool
        self._interval_s = interval_s
        self._evaluate = evaluate
        self._report_damage = report_damage
        self._cursor = spool.cursor(stored.name)
        self._builder: RowBuilder | None = None
        self._is_failing = False
        self._adopted: Sequence[str] = ()

    @property
    def next_seq(self) -> int:
        """The record that comes next."""
        return self._cursor.seq + 1

    def catch_up(self, end_seq: int, keys: Sequence[str]) -> None:
        """Make rows of every record before `end_seq`; when the spool cannot be written, the next call tries again.

        Args:
            end_seq: every record before it is stored or lost.
            keys: templates of the keys that the definitions give now; from when on rows have each is noted.
        """
        try:
            self._adopt(keys)
            self._catch_up(end_seq)
        except SpoolFailedError as error:
            if not self._is_failing:
                _log.error("cannot write the W&B spool (%s): rows wait in the journal meanwhile", error)
            self._is_failing = True
        else:
            if self._is_failing:
                _log.info("the W&B spool can be written again")
            self._is_failing = False

    def finish(self, exit_code: int | None) -> bool:
        """Tell the spool that the session ended; False when it has to be told again."""
        hello = self._stored.hello
        try:
            with spooling(self._report_damage):
                self._spool.finish(hello.run_id, hello.session, CRASHED if exit_code is None else exit_code)
        except SpoolFailedError:
            return False
        return not self._is_failing

    def _adopt(self, keys: Sequence[str]) -> None:
        if keys != self._adopted:
            with spooling(self._report_damage):
                self._spool.adopt(self._stored.name, keys, self._cursor.seq)
            self._adopted = keys

    def _catch_up(self, end_seq: int) -> None:
        hello = self._stored.hello
        if self._builder is None:
            with spooling(self._report_damage):
                self._builder = RowBuilder(self._interval_s, self._spool.open_run(hello))
        cursor, rows = self._cursor, list[Row]()
        for record in self._journal.records(self._stored, cursor.seq + 1, end_seq):
            new, cursor = self._builder.rows_for(record, hello, self._evaluate, cursor)
            rows += [row | {RECORD_KEY: f"{hello.session}:{record.seq}"} for row in new]
            if len(rows) >= ROWS_PER_COMMIT:
                with spooling(self._report_damage):
                    self._spool.append(hello.run_id, hello.session, cursor, rows)
                self._cursor, rows = cursor, []
        if rows:
            with spooling(self._report_damage):
                self._spool.append(hello.run_id, hello.session, cursor, rows)
        self._cursor = cursor
