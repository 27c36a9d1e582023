"""One session inside the pipeline: what was read of it, what it last said, and its series."""

from collections import deque
from itertools import islice

from shared.catalogue import SHOWN_EVENTS
from shared.wire import Event, Record, Snap, Step
from sidecar.journal import Journal
from sidecar.samples import ExportedFamily, Labels, Sample
from sidecar.stored import StoredSession
from sidecar.trainer_series import TrainerSeries

SPEED_STEPS = 50
MAX_EVENTS_READ = 1000
"""How many events are looked through for the newest of each kind."""


class SessionFeed:
    """Reads the records of one session in order, once.

    What the session last said is known from the start, out of the newest records in the journal, so that nothing
    shown of it ever goes back while older records are read again.

    Args:
        stored: the session.
        journal: where its records are.
        first_seq: the record to begin with.
    """

    def __init__(self, stored: StoredSession, journal: Journal, first_seq: int) -> None:
        self.stored = stored
        self.next_seq = first_seq
        self.series = TrainerSeries(stored.hello.schema, stored.labels)
        self.keys: set[tuple[str, Labels]] = set()
        self._last_seq = stored.next_seq - 1
        self.last_time_s = journal.time_before_s(stored.number, stored.next_seq) or stored.hello.start_time_s
        self.newest_step: Step | None = None
        self._newest: dict[str, list[Sample]] = {}
        self._newest_seq: dict[str, int] = {}
        self._times_of_steps: deque[tuple[float, int]] = deque(maxlen=SPEED_STEPS)
        for snap in journal.newest(stored, Snap):
            self._remember(snap, self.series.samples(snap))
            break
        for step in journal.newest(stored, Step):
            self._remember(step, self.series.samples(step))
            break
        for event in islice(journal.newest(stored, Event), MAX_EVENTS_READ):
            self._remember(event, self.series.samples(event))
            if self._newest_seq.keys() >= set(SHOWN_EVENTS):
                break

    @property
    def is_incomplete(self) -> bool:
        """Whether records are known to exist that are not in the journal yet."""
        return self.stored.next_seq < self.stored.end_seq

    @property
    def steps_per_second(self) -> float:
        """Speed over the newest steps."""
        if len(self._times_of_steps) < 2:  # noqa: PLR2004 - a speed needs two points
            return 0.0
        (first_s, first), (last_s, last) = self._times_of_steps[0], self._times_of_steps[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0

    def take(self, record: Record) -> list[Sample]:
        """Take in the next record and return its samples for the store."""
        self.next_seq = record.seq + 1
        samples = self.series.samples(record)
        self.keys.update((sample.name, sample.labels) for sample in samples)
        self._remember(record, samples)
        if isinstance(record, Step):
            if self._times_of_steps and record.time_s < self._times_of_steps[-1][0]:
                self._times_of_steps.clear()  # the clock was set back
            self._times_of_steps.append((record.time_s, record.step))
        elif isinstance(record, Snap):
            # An evaluation stays true until the next one, as it would in a Prometheus that scrapes it every interval.
            lasting = (sample for kind in SHOWN_EVENTS for sample in self._newest.get(kind, ()))
            samples += [sample._replace(time_s=record.time_s) for sample in lasting]
        return samples

    def families(self) -> list[ExportedFamily]:
        """What the session last said."""
        return [family for samples in self._newest.values() for family in self.series.families(samples)]

    def _remember(self, record: Record, samples: list[Sample]) -> None:
        kind = record.kind if isinstance(record, Event) else type(record).__name__
        if not samples or record.seq < self._newest_seq.get(kind, 0):
            return
        self._newest[kind] = list(samples)
        self._newest_seq[kind] = record.seq
        if record.seq > self._last_seq:
            self._last_seq, self.last_time_s = record.seq, record.time_s
        if isinstance(record, Step):
            self.newest_step = record
