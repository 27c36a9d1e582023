"""The way out to Weights & Biases: spool, row feeds and the supervisor of the uploading child, or none of it."""

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from sidecar.config import WandbConfig
from sidecar.database import DatabaseError, mark_damaged
from sidecar.journal import Journal
from sidecar.row_feed import RowFeed
from sidecar.sinks.wandb_settings import NO_CREDENTIALS, WandbSettings, has_credentials
from sidecar.sinks.wandb_spool import Spool, SpoolFailedError, spooling
from sidecar.sinks.wandb_supervisor import WandbSupervisor
from sidecar.status import SinkStatus
from sidecar.stored import StoredSession

SPOOL_NAME = "spool.sqlite"
CLOSE_S = 1.5
"""How long the child may go on sending when the sidecar stops; the rest stays in the spool."""

MAX_LOOK_S = 10.0


class WandbOutlet:
    """Everything about W&B that the daemon needs to know.

    Args:
        config: mode, project and interval.
        state_dir: where the spool is.
        journal: where records are.
        evaluate: values of the definitions, of a `run` label first.
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
        evaluate: Callable[[str, str, float], Mapping[str, float]],
        environ: Mapping[str, str],
        paused: str = "",
    ) -> None:
        self._config = config
        self._paused = paused
        self._path = state_dir / SPOOL_NAME
        self._journal = journal
        self._evaluate = evaluate
        self._environ = environ
        self._has_credentials = has_credentials(environ)
        self._is_damaged = False
        self._spool: Spool | None = None
        self._supervisor: WandbSupervisor | None = None
        if config.mode != "off" and not paused:
            self._open()

    def row_feed(self, stored: StoredSession) -> RowFeed | None:
        """The row feed of a session; a run has one writer, rank 0."""
        spool = self._spool
        if spool is None or stored.hello.rank > 0:
            return None
        with self._spooling():  # known at once, so that the last row on the server can be told from one of others
            spool.open_run(stored.hello)
        evaluate = partial(self._evaluate, stored.run_label)
        return RowFeed(stored, self._journal, spool, self._config.interval_s, evaluate, report_damage=self._note_damage)

    @property
    def spool(self) -> Spool | None:
        """Where rows go; None when they go nowhere now."""
        return self._spool

    def tick(self, now_s: float) -> bool:
        """Look after the uploading child; never blocks. True: the spool was begun anew, so rows must be fed again."""
        if self._supervisor is not None:
            with self._spooling():  # a full disk: the row feed reports it
                self._supervisor.tick(now_s)
            self._is_damaged |= self._supervisor.is_damaged
        if self._is_damaged:
            self.close(0.0)
            mark_damaged(self._path)
            self._open()
            return True
        return False

    def trim(self, max_age_s: float, max_bytes: int) -> bool:
        """Drop rows that W&B has had for long, and the oldest ones of a spool that is too large; True: more is due."""
        more = False
        if self._spool is not None:
            with self._spooling():
                more = self._spool.trim(time.time() - max_age_s, max_bytes)
        return more

    @property
    def num_dropped(self) -> int:
        """Rows that W&B will never get, because the spool was too large."""
        num = 0
        if self._spool is not None:
            with self._spooling():
                num = self._spool.num_dropped
        return num

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

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Stop the child and close the spool."""
        if self._supervisor is not None:
            with self._spooling():
                self._supervisor.close(timeout_s)
        if self._spool is not None:
            self._spool.close()

    def _open(self) -> None:
        """Open the spool. When it was damaged, every session of the journal is made into rows again."""
        asides = self._asides()
        self._is_damaged = False
        try:
            self._spool = Spool(self._path)
            self._supervisor = WandbSupervisor(self._path, wandb_settings(self._config), self._environ)
            if self._asides() != asides:
                self._journal.reopen_sessions()
        except sqlite3.DatabaseError as error:
            raise DatabaseError(f"{self._path}: {error}; move it away, its rows are in the journal too") from error

    def _asides(self) -> set[Path]:
        return set(self._path.parent.glob(f"{SPOOL_NAME}.corrupt-*"))

    def _note_damage(self) -> None:
        self._is_damaged = True

    @contextmanager
    def _spooling(self) -> Iterator[None]:
        """Note damage, and pass over what a full disk does."""
        with suppress(SpoolFailedError), spooling(self._note_damage):
            yield


def wandb_settings(config: WandbConfig) -> WandbSettings:
    """The sink's own settings.

    A child looks at the server often enough, and leaves early enough when it cannot, to be gone before another sidecar
    may take its run over.
    """
    return WandbSettings(
        mode=config.mode,
        project=config.project,
        entity=config.entity,
        transmit_interval_s=config.transmit_interval_s,
        look_interval_s=config.takeover_s / 4,
        look_timeout_s=min(config.takeover_s / 4, MAX_LOOK_S),
        lease_s=config.takeover_s / 2,
        quiet_s=config.takeover_s,
    )
