"""The parts that stand on one journal: receiver, pipeline, the way out to W&B and what is shown of them all.

They are built together and replaced together, while the process, its address and its page stay. So there is one answer
to whatever happens to the disk. A damaged journal is moved aside and a new one begun. While the disk is full or cannot
be written, a station in memory takes over: it fetches from the trainers' rings what it needs to serve, sends nothing to
W&B, and makes way as soon as the file can be written again, which then fetches what it lacks. Only what falls out of a
ring meanwhile is lost, and counted by the journal that lacks it.
"""

import logging
import os
import sqlite3
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec

from shared.curve import CurveClient
from shared.endpoint import live_owner_pid
from sidecar.backfill import BackfillDesk
from sidecar.config import SidecarConfig
from sidecar.database import DatabaseError, NewerVersionError, is_corruption, mark_damaged
from sidecar.history import MARGIN_S
from sidecar.intake import Intake
from sidecar.journal import Counts, Journal
from sidecar.live_definitions import LiveDefinitions
from sidecar.outlet import WandbOutlet
from sidecar.pipeline import Pipeline
from sidecar.publication import Publication
from sidecar.receiver import Receiver
from sidecar.state_dir import is_same_file

JOURNAL_NAME = "journal.sqlite"
MEMORY_JOURNAL_BYTES = 64 * 1024**2
"""What a journal in memory keeps at most."""
PROBE_BYTES = 8 * 1024**2
"""Room that the disk must have before the file is tried again."""
_log = logging.getLogger(__name__)


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """What every station of a sidecar finds: settings, directories, definitions and the address it answers at."""

    config: SidecarConfig
    state_dir: Path
    runtime_dir: Path
    environ: Mapping[str, str]
    definitions: LiveDefinitions
    url: str
    curve: CurveClient | None = None

    @property
    def journal_path(self) -> Path:
        """The journal's file."""
        return self.state_dir / JOURNAL_NAME


class Station:
    """Everything on one journal. One thread only.

    Args:
        around: what it finds.
        journal: closed with the station.
        in_memory: why the journal is in memory, if it is.

    Raises:
        DatabaseError: the spool cannot be used.
        sqlite3.Error: the journal cannot be read.
    """

    def __init__(self, around: Surroundings, journal: Journal, in_memory: str = "") -> None:
        self._around = around
        self.journal = journal
        with ExitStack() as stack:
            stack.callback(journal.close)
            self.outlet = WandbOutlet(
                around.config.wandb, around.state_dir, journal, self._row_values, around.environ, in_memory
            )
            stack.callback(self.outlet.close)
            self.pipeline = Pipeline(journal, self.outlet.row_feed)
            intake = Intake(journal, uuid.uuid4().hex[:12], time.monotonic())
            self.receiver = Receiver(intake, around.runtime_dir, around.config.remote.endpoints, around.curve)
            stack.callback(self.receiver.close)
            self.publication = Publication(journal, self.pipeline, around.definitions, self.outlet, in_memory)
            self.publication.introduce(around.url, around.state_dir, around.runtime_dir)
            self.backfills = BackfillDesk(around.state_dir)
            self._journal_file = around.journal_path.stat() if journal.is_on_disk else None
            self._closing = stack.pop_all()

    @property
    def is_in_place(self) -> bool:
        """Whether what is written can be found again: not when somebody removed or replaced the journal's file."""
        return self._journal_file is None or is_same_file(self._around.journal_path, self._journal_file)

    def start(self) -> None:
        """Listen, and begin to read the past that the definitions look at."""
        self.receiver.start()
        self.pipeline.open(self._window_s())

    def turn(self, budget_s: float) -> None:
        """Take in what has come, for about as long as the budget, and use what is left to fill in the past."""
        definitions = self._around.definitions.current
        self.pipeline.row_keys = tuple(d.wandb for d in definitions.definitions if d.wandb is not None)
        self.pipeline.turn(budget_s)
        if self.pipeline.is_caught_up:
            self.backfills.turn(self.journal, self.outlet.spool, definitions, self._around.config.wandb.interval_s)

    def endpoints(self) -> set[str]:
        """Where the trainers are that the journal knows."""
        return {stored.endpoint for stored in self.journal.unconsumed_sessions()}

    def upload(self) -> None:
        """Look after the upload; a spool that was begun anew gets its rows from the journal again."""
        if self.outlet.tick(time.monotonic()):
            self.pipeline.open(self._window_s())

    def widen(self) -> None:
        """Read more of the past when the definitions look further back than before."""
        if self._window_s() > self.pipeline.store.window_s:
            self.pipeline.open(self._window_s())

    def trim(self) -> bool:
        """Keep journal and spool within their bounds; True when more is due."""
        bounds = self._around.config.journal
        max_bytes = bounds.max_bytes if self.journal.is_on_disk else min(bounds.max_bytes, MEMORY_JOURNAL_BYTES)
        more = self.journal.trim(time.time() - bounds.max_age_s, max_bytes)
        return self.outlet.trim(bounds.max_age_s, bounds.max_bytes) or more

    def close(self) -> None:
        """Stop everything in reverse order of its start, each within its own bound."""
        self._closing.close()

    def _window_s(self) -> float:
        return self._around.definitions.current.history_s + MARGIN_S

    def _row_values(self, run: str, at: str, time_s: float) -> Mapping[str, float]:
        definitions = self._around.definitions.current
        return definitions.evaluate(self.pipeline.store, time_s, "step" if at == "step" else "tick", run).wandb


def open_station(around: Surroundings, in_memory: str = "") -> Station:
    """A station on the file, or in memory when it cannot be used or a reason is given not to try.

    Raises:
        NewerVersionError: the file was written by a newer version.
    """
    path, why = around.journal_path, in_memory
    for _ in range(0 if in_memory else 2):  # the second time a damaged file has been moved aside
        try:
            return Station(around, Journal(path))
        except NewerVersionError:
            raise
        except DatabaseError as error:
            why = str(error)
            break
        except sqlite3.Error as error:
            why = f"{path}: {error}"
            if not is_corruption(error):
                break
            mark_damaged(path)
    _log.error("serving from memory: %s; what is new waits in the trainer until the file can be written", why)
    return Station(around, Journal(None, _counts_on_disk(path)), why)


def live_endpoints(directory: Path) -> set[str]:
    """Where somebody listens now."""
    try:
        return {str(path) for path in directory.glob("*.sock") if live_owner_pid(path) is not None}
    except OSError:
        return set()


def has_room(directory: Path) -> bool:
    """Whether a file of some size can be written there."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return False
    return True


def _counts_on_disk(path: Path) -> Counts | None:
    """The counts of a file that cannot be written, None when it cannot be read either."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            return {(name, label): value for name, label, value in connection.execute("SELECT * FROM counts")}
    except sqlite3.Error:
        return None
