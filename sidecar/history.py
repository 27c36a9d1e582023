"""Definitions over the past: the journal read again in order of time, evaluated at the times it was evaluated live.

A definition is a pure function of samples, and the journal has them all, so what it would have shown can still be had.
Trainers that ran side by side are merged by time. Samples of collectors count from the time they were read; live they
arrive a moment after it, so a value that uses them can differ by one reading.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from shared.wire import Record, Snap, Step
from sidecar.definitions import At, Definition, history_of, values_of
from sidecar.journal import Journal
from sidecar.samples import Labels
from sidecar.session_feed import SessionFeed
from sidecar.store import Store
from sidecar.stored import StoredSession

MARGIN_S = 60.0
"""More of the past than definitions look at: records and readings come a little out of order."""
_AT: dict[type[Record], At] = {Step: "step", Snap: "tick"}


class Moment(NamedTuple):
    """One record of the past, with everything before it in the store."""

    stored: StoredSession
    record: Record
    store: Store


class Point(NamedTuple):
    """One value that a definition had."""

    definition: Definition
    labels: Labels
    time_s: float
    value: float


def at_of(record: Record) -> At | None:
    """Which definitions are evaluated at a record's time."""
    return _AT.get(type(record))


def replay(journal: Journal, definitions: Sequence[Definition], since_s: float) -> Iterator[Moment]:
    """Yield every retained record from a time on, in order.

    Args:
        journal: read only.
        definitions: what is to be evaluated; the store reaches as far back as they look.
        since_s: Unix time of the first record.
    """
    store = Store(history_of(definitions) + MARGIN_S)
    start_s = since_s - store.window_s
    readings = journal.samples_between(start_s, float("inf"))
    waiting = next(readings, None)
    feeds = {stored.number: SessionFeed(stored, journal, 0) for stored in journal.sessions()}
    sources = [_records(journal, feed.stored, start_s) for feed in feeds.values()]
    for record, number in heapq.merge(*sources, key=lambda item: item[0].time_s):
        while waiting is not None and waiting.time_s <= record.time_s:
            store.append(waiting)
            waiting = next(readings, None)
        store.append_many(feeds[number].take(record))
        if record.time_s >= since_s:
            yield Moment(feeds[number].stored, record, store)


def points(moments: Iterable[Moment], definitions: Sequence[Definition]) -> Iterator[Point]:
    """Yield what each definition gives: those for steps at each step, those for ticks at each snapshot.

    Raises:
        PromqlError: one cannot be evaluated.
    """
    for moment in moments:
        at, time_s = at_of(moment.record), moment.record.time_s
        for definition in definitions:
            if definition.at == at:
                for labels, value in values_of(definition, moment.store, time_s):
                    yield Point(definition, labels, time_s, value)


def _records(journal: Journal, stored: StoredSession, start_s: float) -> Iterator[tuple[Record, int]]:
    first_seq = journal.first_seq_since(stored, start_s)
    return ((record, stored.number) for record in journal.records(stored, first_seq, stored.next_seq))
