"""From journal to store and rows: in order, once, and again from where it stopped."""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from trainer_frames import START_S, event, hello, snap, step

from shared.wire import Record, encode
from sidecar.collectors.reading import Reading
from sidecar.exposition import liveness
from sidecar.journal import Journal
from sidecar.pipeline import DOWN_SHOWN_S, Pipeline
from sidecar.row_feed import RowFeed
from sidecar.samples import ExportedFamily
from sidecar.sinks.wandb_spool import Spool
from sidecar.store import Matcher
from sidecar.stored import Batch, StoredSession

WINDOW_S = 300.0


class Bench:
    """A journal and a spool, with pipelines that come and go over them and a wall clock that the test sets."""

    def __init__(self, path: Path) -> None:
        self.journal = Journal(path / "journal.sqlite")
        self.spool = Spool(path / "spool.sqlite")
        self.wall_s = START_S + 10.0
        self.session = self.journal.open_session(hello(), encode(hello()), "/run/a.sock", ())

    def store(self, records: Sequence[Record], end_seq: int = 0, exit_code: int | None = None) -> None:
        """Store records as a complete prefix; with an exit code the session has ended."""
        next_seq = records[-1].seq + 1
        batch = Batch(
            records=[(self.session.number, record, encode(record)) for record in records],
            positions={self.session.number: (next_seq, max(end_seq, next_seq))},
        )
        if exit_code is not None:
            batch.ended.append((self.wall_s, exit_code, self.session.number))
        self.journal.append(batch)

    def pipeline(self) -> Pipeline:
        """A pipeline as a new process would have it."""
        pipeline = Pipeline(self.journal, self._row_feed, wall_s=lambda: self.wall_s)
        pipeline.open(WINDOW_S)
        return pipeline

    def steps(self) -> list[object]:
        """The steps that have rows, in order of the rows."""
        return [row["train/step"] for _, row in self.spool.rows("run", 0, 10**6) if "train/step" in row]

    def _row_feed(self, stored: StoredSession) -> RowFeed:
        return RowFeed(stored, self.journal, self.spool, 15.0, lambda _at, _time_s: {"x": 1.0}, lambda: None)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """An empty bench."""
    bench = Bench(tmp_path)
    yield bench
    bench.spool.close()
    bench.journal.close()


def value(pipeline: Pipeline, name: str, time_s: float) -> float | None:
    """The value of a series at a time."""
    [series] = pipeline.store.select((Matcher("__name__", "=", name),))
    return series.newest(round(time_s * 1e6), 300_000_000)


def reading(time_s: float, number: float) -> Reading:
    """A reading of one host gauge."""
    family = ExportedFamily("dflash_host_load1", "gauge", "Load.", (("dflash_host_load1", (), number),))
    return Reading(collector="host", success=True, time_s=time_s, duration_s=0.0, families=(family,))


def test_records_reach_store_and_rows_in_order(bench: Bench) -> None:
    """Samples carry the records' own times, and every step has one row."""
    bench.store([snap(0), step(1, 1), step(2, 2), snap(3)])
    pipeline = bench.pipeline()
    pipeline.turn(1.0)
    bench.store([step(4, 3)])
    pipeline.turn(1.0)

    assert [value(pipeline, "dflash_step", START_S + t) for t in (0.5, 1.0, 3.9, 4.0)] == [None, 1.0, 2.0, 3.0]
    assert bench.steps() == [1, 2, 3]
    assert pipeline.is_caught_up


def test_restart_neither_loses_nor_repeats_rows(bench: Bench) -> None:
    """Wherever a pipeline stops, the next one goes on from the spool's cursor, and knows the past at once."""
    for first in range(0, 40, 8):
        bench.store([step(seq, seq + 1) for seq in range(first, first + 8)])
        pipeline = bench.pipeline()
        pipeline.turn(1.0)

    assert bench.steps() == list(range(1, 41))
    assert value(pipeline, "dflash_step", START_S + 0.0) == 1.0


def test_only_the_window_is_read_again(bench: Bench) -> None:
    """What is older than the definitions look back is not read at a restart, once its rows are made."""
    bench.store([step(seq, seq + 1) for seq in range(1000)])
    bench.pipeline().turn(5.0)
    bench.wall_s = START_S + 1000.0

    again = bench.pipeline()

    assert again.feeds[bench.session.number].next_seq == 700


def test_what_is_shown_never_goes_back_while_the_past_is_read(bench: Bench) -> None:
    """Before anything is fed, a new pipeline already shows what the session last said."""
    bench.store([event(0, "evaluation", accept_length=2.5), *(snap(n, (n, 2, 3, 1, 0, 9)) for n in range(1, 400))])
    pipeline = bench.pipeline()
    shown = []
    for _ in range(2):
        families = {f.name: f.points for f in pipeline.feeds[bench.session.number].families()}
        shown.append((families["dflash_steps_total"][0][2], families["dflash_accept_length"][0][2]))
        pipeline.turn(5.0)

    assert shown == [(399.0, 2.5), (399.0, 2.5)]


def test_newest_event_of_each_kind_is_known_after_a_restart(bench: Bench) -> None:
    """A new pipeline shows when each kind of event last happened, though the newest event is of one kind only."""
    kinds = ("checkpoint", "evaluation", "checkpoint", "hundred other", "checkpoint")
    bench.store([event(seq, kind, accept_length=2.5) for seq, kind in enumerate(kinds)])
    expected = {"checkpoint": START_S + 4, "evaluation": START_S + 1}

    pipeline = bench.pipeline()

    for _ in range(2):
        families = pipeline.feeds[bench.session.number].families()
        points = [point for f in families if f.name == "dflash_event_timestamp_seconds" for point in f.points]
        assert {dict(labels)["kind"]: time_s for _, labels, time_s in points} == expected
        pipeline.turn(1.0)


def test_end_of_a_session_ends_its_series_and_its_run(bench: Bench) -> None:
    """After the last record the series go stale, the spool knows the exit code, and the trainer is shown as down."""
    bench.store([snap(0), step(1, 1)], exit_code=3)
    pipeline = bench.pipeline()
    pipeline.turn(1.0)

    assert value(pipeline, "dflash_step", bench.wall_s - 1.0) == 1.0
    assert value(pipeline, "dflash_step", bench.wall_s) is None
    assert bench.spool.run("run").exit_code == 3
    assert bench.journal.unconsumed_sessions() == []
    [up] = liveness(pipeline.feeds.values(), pipeline.gone)
    assert up.points == (("dflash_trainer_up", (), 0.0),)

    bench.wall_s += DOWN_SHOWN_S + 1.0
    pipeline.turn(1.0)

    assert liveness(pipeline.feeds.values(), pipeline.gone) == ()


def test_collector_samples_wait_for_records_that_are_being_replayed(bench: Bench) -> None:
    """A sample newer than a record still to come enters the store after it, in order of time."""
    bench.store([snap(0)], end_seq=3)
    pipeline = bench.pipeline()
    pipeline.turn(1.0)
    pipeline.add_readings([reading(START_S + 9.0, 1.0)])
    pipeline.turn(1.0)
    assert "dflash_host_load1" not in pipeline.store.names()

    bench.store([snap(1), snap(2)])
    pipeline.turn(1.0)

    assert value(pipeline, "dflash_host_load1", START_S + 9.0) == 1.0


def test_collector_samples_come_back_after_a_restart(bench: Bench) -> None:
    """Readings are in the journal, each once, and merged by time with the records."""
    bench.store([snap(0)])
    pipeline = bench.pipeline()
    for _ in range(3):
        pipeline.add_readings([reading(START_S + 1.0, 4.0)])
    bench.store([snap(seq) for seq in range(1, 6)])

    again = bench.pipeline()
    again.turn(1.0)

    assert value(again, "dflash_host_load1", START_S + 5.0) == 4.0
    assert len([s for s in bench.journal.samples_between(0, 2e9) if s.name == "dflash_host_load1"]) == 1


def test_readings_of_one_turn_are_one_row_in_order_of_time(bench: Bench, tmp_path: Path) -> None:
    """What several collectors read between two turns is written at once."""
    pipeline = bench.pipeline()
    disk = Reading(collector="disk", success=True, time_s=START_S + 0.5, duration_s=0.0)
    pipeline.add_readings([reading(START_S + 1.0, 4.0), disk])

    samples = list(bench.journal.samples_between(0, 2e9))
    assert [sample.time_s for sample in samples] == sorted(sample.time_s for sample in samples)
    assert {dict(sample.labels).get("collector") for sample in samples} >= {"host", "disk"}
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as file:
        assert file.execute("SELECT count(*) FROM samples").fetchone() == (1,)


def test_series_a_collector_no_longer_shows_end(bench: Bench) -> None:
    """A reading without a series that the one before had ends that series."""
    pipeline = bench.pipeline()
    pipeline.add_readings([reading(START_S + 1.0, 4.0)])
    pipeline.turn(1.0)
    pipeline.add_readings([Reading(collector="host", success=False, time_s=START_S + 2.0, duration_s=0.0)])
    pipeline.turn(1.0)

    assert value(pipeline, "dflash_host_load1", START_S + 1.5) == 4.0
    assert value(pipeline, "dflash_host_load1", START_S + 2.0) is None


def test_spool_that_cannot_be_written_delays_rows_only(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """While the spool refuses, the store goes on and one line is logged; afterwards every row is there."""
    pipeline = bench.pipeline()
    bench.spool._connection.execute("PRAGMA query_only = ON")
    for seq in range(3):
        bench.store([step(seq, seq + 1)])
        pipeline.turn(1.0)
    assert value(pipeline, "dflash_step", START_S + 2.0) == 3.0
    assert caplog.text.count("cannot write the W&B spool") == 1

    bench.spool._connection.execute("PRAGMA query_only = OFF")
    pipeline.turn(1.0)

    assert bench.steps() == [1, 2, 3]


def test_small_budget_is_kept_and_nothing_is_skipped(bench: Bench) -> None:
    """A turn without time feeds nothing of a backlog, and later turns bring all of it."""
    bench.store([step(seq, seq + 1) for seq in range(450)])
    pipeline = bench.pipeline()
    pipeline.turn(0.0)
    assert (pipeline.is_caught_up, bench.steps()) == (False, [])

    turns = _turns_until(lambda: pipeline.is_caught_up, lambda: pipeline.turn(0.001))

    assert turns >= 1
    assert bench.steps() == list(range(1, 451))


def _turns_until(done: Callable[[], bool], turn: Callable[[], None]) -> int:
    for number in range(10_000):
        if done():
            return number
        turn()
    raise AssertionError("never done")


def test_what_is_known_of_a_session_follows_a_clock_that_is_set_back(bench: Bench) -> None:
    """The newest record says when it was heard, the evaluation stays true, the speed is never absurd, rows go on."""
    early = START_S + 100.0
    bench.wall_s = early
    records: list[Record] = [step(0, 1), event(1, "evaluation", accept_length=2.5), snap(2)]
    late = [msgspec.structs.replace(record, time_s=early + 10_800.0 + record.seq) for record in records]
    back = [msgspec.structs.replace(record, time_s=early + record.seq) for record in (step(3, 2), snap(4), step(5, 3))]
    bench.store([*late, *back])
    pipeline = bench.pipeline()
    pipeline.turn(5.0)
    [feed] = pipeline.feeds.values()

    assert feed.last_time_s == early + 5.0
    assert value(pipeline, "dflash_accept_length", early + 5.0) == 2.5
    assert feed.steps_per_second == 0.5
    assert sum("x" in row and "train/step" not in row for _, row in bench.spool.rows("run", 0, 100)) == 2


def test_readings_follow_a_clock_that_is_set_back_and_ignore_late_ones(bench: Bench) -> None:
    """A reading from after the step counts; one that was begun before the newest, and hung, does not."""
    pipeline = bench.pipeline()

    def read(time_s: float, success: bool) -> None:
        reading = Reading(collector="host", success=success, time_s=time_s, duration_s=0.1)
        pipeline.add_readings([reading, reading])
        pipeline.turn(1.0)

    bench.wall_s = START_S + 10_900.0
    read(bench.wall_s, success=True)
    read(bench.wall_s - 60.0, success=False)
    assert value(pipeline, "dflash_collector_success", bench.wall_s) == 1.0
    bench.wall_s = START_S + 100.0
    read(bench.wall_s, success=False)

    assert value(pipeline, "dflash_collector_success", bench.wall_s) == 0.0
    assert len(list(bench.journal.samples_between(0.0, START_S + 20_000.0))) == 4
