"""Fills the past of a new metric into W&B, a little in every turn of the main loop.

The rows go into the spool behind those that are there, each with the training step and the time it is about, in one
transaction with how far they reach; so an interrupted backfill that is asked for again goes on where it was, and one
that is complete does nothing. Live rows have a key from the record on at which its definition was adopted, backfilled
ones up to there: no moment has a key twice.

A request is a file in the state directory. It stays until it is done, so it survives the sidecar, and only who may
write there can ask.
"""

import contextlib
import logging
import sqlite3
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from shared.wire import Record, Step
from sidecar.definitions import Definition, DefinitionSet
from sidecar.history import Moment, at_of, replay
from sidecar.journal import Journal
from sidecar.past import PastError, chosen
from sidecar.sinks.wandb_rows import axes, is_due
from sidecar.sinks.wandb_run import STEP_AXIS, Cursor, Row
from sidecar.sinks.wandb_spool import Spool

REQUEST_NAME = "backfill.json"
ROWS_PER_COMMIT = 500
TURN_S = 0.2
_log = logging.getLogger(__name__)


class BackfillRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for: these definitions, from a Unix time on."""

    id: str
    metrics: tuple[str, ...]
    since_s: float


class BackfillStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How it goes: running, done or failed; `reached_s` is the time of the last record that was looked at."""

    id: str
    state: str
    metrics: tuple[str, ...]
    rows: int = 0
    reached_s: float = 0.0
    detail: str = ""


def ask(state_dir: Path, metrics: Sequence[str], since_s: float) -> BackfillRequest:
    """Leave a request for the sidecar of a state directory; raises PastError when there is one already."""
    request = BackfillRequest(id=uuid.uuid4().hex[:12], metrics=tuple(metrics), since_s=since_s)
    path = state_dir / REQUEST_NAME
    draft = path.with_suffix(f".{request.id}")
    try:
        draft.write_bytes(msgspec.json.encode(request))
        path.hardlink_to(draft)  # whole or not at all, and never over another
    except FileExistsError as error:
        raise PastError(f"{path}: another backfill is not done yet; wait for it, or remove the file") from error
    except OSError as error:
        raise PastError(f"{path}: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)
    return request


class Backfill:
    """One request on its way. One thread only.

    Args:
        request: what is asked for.
        journal: where the past is.
        spool: where rows go.
        definitions: what is live.
        interval_s: least time between telemetry rows.

    Raises:
        PastError: a metric is not live, or has no key in W&B.
    """

    def __init__(
        self,
        request: BackfillRequest,
        journal: Journal,
        spool: Spool,
        definitions: DefinitionSet,
        interval_s: float,
    ) -> None:
        self._definitions = definitions
        self._wanted = chosen(definitions, request.metrics)
        if request.metrics and (keyless := [d.name for d in self._wanted if d.wandb is None]):
            raise PastError(f"{keyless[0]}: its definition names no wandb key, so it has no place there")
        self._wanted = [definition for definition in self._wanted if definition.wandb is not None]
        self._spool = spool
        self._interval_s = interval_s
        self._sessions: dict[str, _Filling | None] = {}
        self._moments = replay(journal, self._wanted, request.since_s)
        self._reached_s = 0.0
        self.status = BackfillStatus(
            id=request.id, state="running", metrics=tuple(definition.name for definition in self._wanted)
        )

    def turn(self, budget_s: float) -> bool:
        """Go on for about as long as the budget; True when it is done.

        Raises:
            PastError: the spool cannot be written.
            sqlite3.Error: the journal cannot be read.
        """
        deadline_s = time.monotonic() + budget_s
        for moment in self._moments:
            self._fill(moment)
            self._reached_s = moment.record.time_s
            if time.monotonic() > deadline_s:
                self._commit()
                return False
        self._commit()
        self.status = msgspec.structs.replace(self.status, state="done")
        return True

    def _fill(self, moment: Moment) -> None:
        filling = self._filling(moment)
        if filling is None:
            return
        lacking = filling.lacking(moment.record, self._interval_s)
        if not lacking:
            return
        subset = msgspec.structs.replace(self._definitions, definitions=tuple(lacking))
        run = moment.stored.run_label
        values = subset.evaluate(moment.store, moment.record.time_s, lacking[0].at, run).wandb
        filling.add(moment.record, lacking, values)
        if len(filling.rows) >= ROWS_PER_COMMIT:
            self._commit()

    def _filling(self, moment: Moment) -> "_Filling | None":
        """What is known of a session; None for one that has no rows in W&B."""
        stored = moment.stored
        if stored.name not in self._sessions:
            with _spooling():
                has_rows = stored.hello.rank == 0 and self._spool.cursor(stored.name).seq >= 0
                self._sessions[stored.name] = (
                    _Filling(stored.name, stored.hello.run_id, self._spool, self._wanted) if has_rows else None
                )
        return self._sessions[stored.name]

    def _commit(self) -> None:
        num_rows = self.status.rows
        with _spooling():
            for filling in self._sessions.values():
                if filling is not None:
                    num_rows += filling.commit()
        self.status = msgspec.structs.replace(self.status, rows=num_rows, reached_s=self._reached_s)


@contextlib.contextmanager
def _spooling() -> Iterator[None]:
    """Tell trouble with the spool from trouble with the journal, which is not ours to handle."""
    try:
        yield
    except sqlite3.Error as error:
        raise PastError(f"the W&B spool cannot be used ({error}); ask again when it can") from error


class _Filling:
    """One session: which keys lack which records, and the rows that are not committed yet."""

    def __init__(self, session: str, run_id: str, spool: Spool, wanted: Sequence[Definition]) -> None:
        self._session = session
        self._run_id = run_id
        self._spool = spool
        self._run_start_s = spool.run_start_s(run_id)
        self._wanted = wanted
        keys = [definition.wandb or "" for definition in wanted]
        self._last = {key: spool.adopted_after(session, key) for key in keys}
        self._cursors = {key: spool.backfill_cursor(session, key) for key in keys}
        self._changed: set[str] = set()
        self.rows: list[Row] = []

    def lacking(self, record: Record, interval_s: float) -> list[Definition]:
        """The definitions whose keys this record has no row for, live or filled in."""
        return [d for d in self._wanted if self._lacks(d, record, interval_s)]

    def _lacks(self, definition: Definition, record: Record, interval_s: float) -> bool:
        key = definition.wandb or ""
        cursor = self._cursors[key]
        if definition.at != at_of(record):
            return False
        if definition.at == "tick" and not is_due(record.time_s, cursor.last_telemetry_time_s, interval_s):
            return False
        return cursor.seq < record.seq <= self._last[key]

    def add(self, record: Record, lacking: Sequence[Definition], values: "dict[str, float]") -> None:
        """Make a row of what the record gives, and note that it was looked at."""
        for definition in lacking:
            key = definition.wandb or ""
            self._cursors[key] = Cursor(record.seq, record.time_s)
            self._changed.add(key)
        if values:
            step: Row = {STEP_AXIS: record.step} if isinstance(record, Step) else {}
            self.rows.append(values | step | axes(record.time_s, self._run_start_s))

    def commit(self) -> int:
        """Write what there is, all or nothing; returns the number of rows."""
        if not self._changed:
            return 0
        cursors = {(self._session, key): self._cursors[key] for key in self._changed}
        self._spool.add_backfill(self._run_id, self.rows, cursors)
        num_rows, self.rows, self._changed = len(self.rows), [], set()
        return num_rows


class BackfillDesk:
    """Takes requests from the state directory and works on one at a time, across restarts.

    Args:
        state_dir: where requests are left.
    """

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / REQUEST_NAME
        self._work: Backfill | None = None
        self.status: BackfillStatus | None = None
        """Of the newest request since the start."""

    def turn(self, journal: Journal, spool: Spool | None, definitions: DefinitionSet, interval_s: float) -> None:
        """Go on a little, or look for a request. Raises sqlite3.Error, after which the next turn begins anew."""
        work, self._work = self._work or self._begin(journal, spool, definitions, interval_s), None
        if work is None:
            return
        try:
            is_done = work.turn(TURN_S)
        except PastError as error:
            self._end(msgspec.structs.replace(work.status, state="failed", detail=str(error)))
            return
        self.status = work.status
        if is_done:
            self._end(work.status)
        else:
            self._work = work

    def _begin(
        self, journal: Journal, spool: Spool | None, definitions: DefinitionSet, interval_s: float
    ) -> Backfill | None:
        try:
            request = msgspec.json.decode(self._path.read_bytes(), type=BackfillRequest)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            self._end(BackfillStatus(id="", state="failed", metrics=(), detail=f"{self._path}: {error}"))
            return None
        refused = BackfillStatus(id=request.id, state="failed", metrics=request.metrics)
        if spool is None:
            self._end(msgspec.structs.replace(refused, detail="W&B is off, or its spool cannot be written now"))
            return None
        try:
            return Backfill(request, journal, spool, definitions, interval_s)
        except PastError as error:
            self._end(msgspec.structs.replace(refused, detail=str(error)))
            return None

    def _end(self, status: BackfillStatus) -> None:
        self.status = status
        metrics = ", ".join(status.metrics)
        if status.state == "done":
            _log.info("backfill of %s is done: %d rows", metrics, status.rows)
        else:
            _log.error("backfill of %s failed: %s", metrics, status.detail)
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
