"""The way out to Weights & Biases: spool, row feeds and the supervisor of the uploading child, or none of it."""

import sqlite3
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from sidecar.config import WandbConfig
from sidecar.database import DatabaseError
from sidecar.journal import Journal
from sidecar.row_feed import RowFeed
from sidecar.sinks.wandb_rows import Evaluate
from sidecar.sinks.wandb_settings import NO_CREDENTIALS, WandbSettings, has_credentials
from sidecar.sinks.wandb_spool import Spool
from sidecar.sinks.wandb_supervisor import WandbSupervisor
from sidecar.status import SinkStatus
from sidecar.stored import StoredSession

SPOOL_NAME = "spool.sqlite"
CLOSE_S = 1.5
"""How long the child may go on sending when the sidecar stops; the rest stays in the spool."""


class WandbOutlet:
    """Everything about W&B that the daemon needs to know.

    Args:
        config: mode, project and interval.
        state_dir: where the spool is.
        journal: where records are.
        evaluate: values of the definitions.
        environ: where credentials come from.
        paused: why nothing goes out for now, if so; the spool is left alone then.

    Raises:
        DatabaseError: the spool cannot be used.
    """

    def __init__(
        self,
        config: WandbConfig,
        state_dir: Path,
        journal: Journal,
        evaluate: Evaluate,
        environ: Mapping[str, str],
        paused: str = "",
    ) -> None:
        self._config = config
        self._paused = paused
        self._journal = journal
        self._evaluate = evaluate
        self._has_credentials = has_credentials(environ)
        self._spool: Spool | None = None
        self._supervisor: WandbSupervisor | None = None
        if config.mode != "off" and not paused:
            path = state_dir / SPOOL_NAME
            try:
                self._spool = Spool(path)
                self._supervisor = WandbSupervisor(path, wandb_settings(config), environ)
            except sqlite3.DatabaseError as error:
                raise DatabaseError(f"{path}: {error}; move it away, its rows are in the journal too") from error

    def row_feed(self, stored: StoredSession) -> RowFeed | None:
        """The row feed of a session; a run has one writer, rank 0."""
        if self._spool is None or stored.hello.rank > 0:
            return None
        return RowFeed(stored, self._journal, self._spool, self._config.interval_s, self._evaluate)

    def tick(self, now_s: float) -> None:
        """Look after the uploading child; never blocks."""
        if self._supervisor is not None:
            with suppress(sqlite3.OperationalError):  # a full disk: the row feed reports it
                self._supervisor.tick(now_s)

    def prune(self, max_age_s: float) -> None:
        """Drop rows that W&B has had for long."""
        if self._spool is not None:
            with suppress(sqlite3.OperationalError):
                self._spool.prune(time.time() - max_age_s)

    def state(self) -> SinkStatus:
        """How it goes."""
        if self._config.mode != "off" and self._paused:
            return SinkStatus(state="waiting", lag=0, detail=self._paused)
        if self._supervisor is None:
            return SinkStatus(state="off", lag=0)
        state = self._supervisor.state()
        return SinkStatus(state=state.state, lag=state.lag_records, detail=state.detail)

    def summary(self) -> str:
        """What is to be expected, for the start-up line."""
        if self._config.mode == "online":
            return (
                f"online, project {self._config.project}" if self._has_credentials else f"online, but {NO_CREDENTIALS}"
            )
        return {"offline": "offline, rows wait in the spool for `dflash-sidecar push`", "off": "off"}[self._config.mode]

    def close(self) -> None:
        """Stop the child and close the spool."""
        if self._supervisor is not None:
            self._supervisor.close(CLOSE_S)
        if self._spool is not None:
            self._spool.close()


def wandb_settings(config: WandbConfig) -> WandbSettings:
    """The sink's own settings."""
    return WandbSettings(
        mode=config.mode,
        project=config.project,
        entity=config.entity,
        transmit_interval_s=config.transmit_interval_s,
    )
