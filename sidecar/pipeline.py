"""From the journal to the store and the W&B rows, in order, every record once per process life.

After a restart the part of the past that the definitions look at is read again, so that rates are there at once, and
rows go on from the spool's cursor. Samples of collectors are merged in by time: those that are newer than a record
which is still to come wait for it, because the store forgets by its newest sample.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from operator import attrgetter

from shared.remote import is_remote
from sidecar.collectors.reading import Reading, outcomes_of
from sidecar.gpu_owners import Owner, owners_of
from sidecar.journal import READ_BATCH, Journal
from sidecar.row_feed import RowFeed
from sidecar.samples import Sample, samples_of
from sidecar.session_feed import SessionFeed
from sidecar.store import SeriesKey, Store
from sidecar.stored import StoredSession

MAX_HOLD_S = 60.0
"""How long samples of collectors wait at most for records that are being replayed."""
DOWN_SHOWN_S = 300.0
"""How long a trainer that is gone is shown as down."""


class Pipeline:
    """Feeds store and spool. One thread only, except `trainers`.

    Args:
        journal: where records come from.
        row_feed: makes the row feed of a session; None for a session without rows.
        wall_s: Unix time.
    """

    def __init__(
        self,
        journal: Journal,
        row_feed: Callable[[StoredSession], RowFeed | None],
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._journal = journal
        self._row_feed = row_feed
        self._wall_s = wall_s
        self.store = Store(0.0)
        self.feeds: dict[int, SessionFeed] = {}
        self.gone: StoredSession | None = None
        """The trainer that left last, while it is to be shown as down."""
        self.trainers: Sequence[StoredSession] = ()
        """Each live trainer of this machine; replaced as a whole, so any thread may read it."""
        self.gpu_owners: Mapping[str, Owner] = {}
        """Bare UUID of a GPU to whose it is; replaced as a whole too."""
        self.is_caught_up = False
        self.row_keys: Sequence[str] = ()
        """Templates of the W&B keys that the definitions give now."""
        self._rows: dict[int, RowFeed] = {}
        self._waiting: list[Sample] = []
        self._read_s: dict[str, float] = {}
        self._shown: dict[str, set[SeriesKey]] = {}

    def open(self, window_s: float) -> None:
        """Begin, or begin again with another window: what lies in it is read at the next turns."""
        start_s = self._wall_s() - window_s
        self.store = Store(window_s)
        # What lies in the future was stamped before the clock was set back.
        self._waiting = list(self._journal.samples_between(start_s, self._wall_s() + MAX_HOLD_S))
        self.feeds.clear()
        self._rows.clear()
        for stored in self._journal.sessions():
            self._begin(stored, start_s)
            if self._ended_lately(stored):
                self.gone = stored
        self.is_caught_up = False

    def turn(self, budget_s: float) -> None:
        """Feed what is there, for about as long as the budget."""
        deadline_s = time.monotonic() + budget_s
        known = {stored.number: stored for stored in self._journal.unconsumed_sessions()}
        for number, stored in known.items():
            if number not in self.feeds:
                self._begin(stored, self._wall_s() - self.store.window_s)
            self.feeds[number].stored = stored
        live = [stored for stored in known.values() if stored.ended_s is None]
        self.trainers = [stored for stored in live if not is_remote(stored.endpoint)]
        self.gpu_owners = owners_of(self.trainers)
        for feed in list(self.feeds.values()):
            self._advance(feed, deadline_s)
        behind = [f for f in self.feeds.values() if f.next_seq < f.stored.next_seq]
        self.is_caught_up = not behind
        repairing = any(f.is_incomplete for f in self.feeds.values())
        self._release(self._wall_s() - MAX_HOLD_S if behind or repairing else math.inf)
        if self.gone is not None and not self._ended_lately(self.gone):
            self.gone = None

    def shows(self, endpoints: set[str]) -> bool:
        """Whether everything in the journal is read, and from these endpoints all that they had published."""
        complete = {feed.stored.endpoint for feed in self.feeds.values() if not feed.is_incomplete}
        return self.is_caught_up and endpoints <= complete

    def add_readings(self, readings: Iterable[Reading]) -> None:
        """Keep the samples of new readings, in the journal too, all of one turn as one row."""
        by_collector: dict[str, list[Reading]] = {}
        for reading in readings:
            by_collector.setdefault(reading.collector, []).append(reading)
        samples: list[Sample] = []
        for collector, its_readings in by_collector.items():
            if new := [reading for reading in its_readings if self._is_new(reading)]:
                time_s = max(reading.time_s for reading in new)
                for reading in new:
                    samples += samples_of(reading.families, reading.time_s)
                outcomes = outcomes_of(its_readings)
                samples += samples_of(outcomes, time_s)
                families = (*(family for reading in its_readings for family in reading.families), *outcomes)
                self._show(collector, {point[:2] for family in families for point in family.points}, time_s)
        samples.sort(key=attrgetter("time_s"))
        self._journal.append_samples(samples)
        self._waiting += samples

    def _is_new(self, reading: Reading) -> bool:
        source, now_s = f"{reading.collector} {reading.source}", self._wall_s()
        last_s = self._read_s.get(source, 0.0)
        if reading.time_s <= last_s and not reading.time_s <= now_s < last_s:  # the latter after the clock was set back
            return False
        self._read_s[source] = reading.time_s
        return True

    def add_samples(self, source: str, samples: Sequence[Sample], time_s: float) -> None:
        """Keep what a source shows now; series that it no longer shows end."""
        self._waiting += samples
        self._show(source, {(sample.name, sample.labels) for sample in samples}, time_s)

    def _show(self, source: str, keys: set[SeriesKey], time_s: float) -> None:
        self.store.mark_stale(self._shown.get(source, set()) - keys, time_s)
        self._shown[source] = keys

    def _ended_lately(self, stored: StoredSession) -> bool:
        return stored.ended_s is not None and abs(self._wall_s() - stored.ended_s) < DOWN_SHOWN_S

    def _begin(self, stored: StoredSession, start_s: float) -> None:
        first_seq = self._journal.first_seq_since(stored, start_s)
        if not stored.consumed and (rows := self._row_feed(stored)) is not None:
            self._rows[stored.number] = rows
            first_seq = min(first_seq, rows.next_seq)
        if first_seq < stored.next_seq or not stored.consumed:
            self.feeds[stored.number] = SessionFeed(stored, self._journal, first_seq)

    def _advance(self, feed: SessionFeed, deadline_s: float) -> None:
        stored = feed.stored
        while feed.next_seq < stored.next_seq and time.monotonic() < deadline_s:
            records = list(islice(self._journal.records(stored, feed.next_seq, stored.next_seq), READ_BATCH))
            for record in records:
                self._release(record.time_s)
                self.store.append_many(feed.take(record))
            if len(records) < READ_BATCH:
                feed.next_seq = stored.next_seq  # at once over what was lost, however much it is
            self._make_rows(feed)
        self._make_rows(feed)
        if stored.ended_s is not None and feed.next_seq >= stored.next_seq:
            self._finish(feed)

    def _make_rows(self, feed: SessionFeed) -> None:
        rows = self._rows.get(feed.stored.number)
        if rows is not None and rows.next_seq < feed.next_seq:
            rows.catch_up(feed.next_seq, self.row_keys)

    def _finish(self, feed: SessionFeed) -> None:
        stored = feed.stored
        rows = self._rows.get(stored.number)
        if rows is not None and not rows.finish(stored.exit_code):
            return
        self.store.mark_stale(feed.keys, stored.ended_s or feed.last_time_s)
        if not stored.consumed:
            self._journal.mark_consumed(stored.number)
            self.gone = stored
        del self.feeds[stored.number]
        self._rows.pop(stored.number, None)

    def _release(self, time_s: float) -> None:
        """Let samples of collectors up to a time into the store."""
        if not self._waiting:
            return
        num = len(self._waiting)
        if time_s < math.inf:
            num = next((i for i, sample in enumerate(self._waiting) if sample.time_s > time_s), num)
        self.store.append_many(self._waiting[:num])
        del self._waiting[:num]
