"""The way out to Weights & Biases: spool, row feeds and the supervisor of the uploading child, or none of it."""

import sqlite3
from pathlib import Path

from sidecar.config import WandbConfig
from sidecar.database import DatabaseError
from sidecar.journal import Journal, StoredSession
from sidecar.row_feed import RowFeed
from sidecar.sinks.wandb_rows import Evaluate
from sidecar.sinks.wandb_spool import Spool
from sidecar.status import SinkStatus

SPOOL_NAME = "spool.sqlite"


class WandbOutlet:
    """Everything about W&B that the daemon needs to know.

    Args:
        config: mode, project and interval.
        state_dir: where the spool is.
        journal: where records are.
        evaluate: values of the definitions.

    Raises:
        DatabaseError: the spool cannot be used.
    """

    def __init__(self, config: WandbConfig, state_dir: Path, journal: Journal, evaluate: Evaluate) -> None:
        self._config = config
        self._journal = journal
        self._evaluate = evaluate
        self._spool = None if config.mode == "off" else open_spool(state_dir)

    def row_feed(self, stored: StoredSession) -> RowFeed | None:
        """The row feed of a session; a run has one writer, rank 0."""
        if self._spool is None or stored.hello.rank > 0:
            return None
        return RowFeed(stored, self._journal, self._spool, self._config.interval_s, self._evaluate)

    def tick(self, now_s: float) -> None:
        """Look after the uploading child; never blocks."""

    def state(self) -> SinkStatus:
        """How it goes."""
        if self._spool is None:
            return SinkStatus(state="off", lag=0)
        lag = sum(run.num_waiting for run in self._spool.runs())
        return SinkStatus(state="offline", lag=lag, detail="rows wait in the spool for `dflash-sidecar push`")

    def summary(self) -> str:
        """How it goes, in a few words."""
        state = self.state()
        return f"{state.state} ({state.detail})" if state.detail else state.state

    def close(self) -> None:
        """Stop the child and close the spool."""
        if self._spool is not None:
            self._spool.close()


def open_spool(state_dir: Path) -> Spool:
    """Open the spool of a state directory; raises DatabaseError."""
    path = state_dir / SPOOL_NAME
    try:
        return Spool(path)
    except sqlite3.DatabaseError as error:
        raise DatabaseError(f"{path}: {error}; move it away, its rows are made again from the journal") from error
