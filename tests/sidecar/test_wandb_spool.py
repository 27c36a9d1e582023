"""Rows of records, and the spool that numbers them."""

import math
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.schema import Schema
from shared.wire import Device, Event, Hello, Record, Scalar, Snap, Step
from sidecar.sinks.wandb_rows import RowBuilder
from sidecar.sinks.wandb_run import Cursor, Row, run_config
from sidecar.sinks.wandb_spool import Spool


def hello(
    session: str = "s1", run_id: str = "run", start_time_s: float = 100.0, rank: int = 0, **config: Scalar
) -> Hello:
    """A session of a run."""
    return Hello(
        version=1,
        run_id=run_id,
        session=session,
        pid=1,
        start_time_s=start_time_s,
        interval_s=1.0,
        topology=(Device("drafter", "0", "cuda:1", "GPU-1"),),
        config=config,
        schema=Schema((), ()),
        schema_digest="",
        first_seq=0,
        next_seq=0,
        rank=rank,
    )


def snap(seq: int, time_s: float) -> Snap:
    """A snapshot."""
    return Snap(session="s1", seq=seq, time_s=time_s, monotonic_s=time_s, values=b"")


STEP = Step(
    session="s1",
    seq=4,
    time_s=107.5,
    step=12,
    loss=2.5,
    accuracy_ratio=(0.75, 0.5),
    accept_length_simulated=1.5,
    learning_rate=1e-3,
    grad_norm=0.25,
    tokens_real=100,
    tokens_padding=28,
    sequence_lengths_tokens=(64, 36),
    queue_wait_s=0.125,
)


def definitions(at: str, time_s: float) -> dict[str, float]:
    """Stands in for the engine: one definition per kind of row."""
    return {"efficiency/step_rate": 2.0 * time_s} if at == "step" else {"gpu/power_w": 600.0}


def test_step_row_is_exactly_this() -> None:
    """A step record gives one row with every training value, both axes, its own time, and the step definitions."""
    rows, cursor = RowBuilder(15.0, 100.0).rows_for(STEP, hello(), definitions, Cursor(3, 90.0))

    assert rows == [
        {
            "train/step": 12,
            "train/loss": 2.5,
            "train/accuracy/1": 0.75,
            "train/accuracy/2": 0.5,
            "train/accept_length_simulated": 1.5,
            "train/learning_rate": 1e-3,
            "train/grad_norm": 0.25,
            "train/tokens_real": 100,
            "train/tokens_padding": 28,
            "train/queue_wait_s": 0.125,
            "time/elapsed_s": 7.5,
            "_timestamp": 107.5,
            "efficiency/step_rate": 215.0,
        }
    ]
    assert cursor == Cursor(4, 90.0)


def test_telemetry_row_follows_the_time_of_snapshots() -> None:
    """A telemetry row comes with the first snapshot and then whenever the interval has passed in record time."""
    builder, cursor, times = RowBuilder(15.0, 100.0), Cursor(), []
    for seq, time_s in enumerate([100.0, 101.0, 114.9, 115.0, 129.0, 131.0]):
        rows, cursor = builder.rows_for(snap(seq, time_s), hello(), definitions, cursor)
        times += [row["_timestamp"] for row in rows]

    assert times == [100.0, 115.0, 131.0]
    assert cursor == Cursor(5, 131.0)


def test_telemetry_row_waits_for_something_to_say() -> None:
    """While no definition has a value there is no empty row, and the first value does not wait for another interval."""
    builder = RowBuilder(15.0, 100.0)
    none, cursor = builder.rows_for(snap(0, 100.0), hello(), lambda _at, _time_s: {}, Cursor())
    some, _ = builder.rows_for(snap(1, 101.0), hello(), definitions, cursor)

    assert (none, some) == ([], [{"gpu/power_w": 600.0, "time/elapsed_s": 1.0, "_timestamp": 101.0}])


def test_only_evaluations_among_events_make_rows() -> None:
    """An evaluation event becomes eval/<key>; other events make no row but move the cursor."""
    builder = RowBuilder(15.0, 100.0)
    evaluation = Event("s1", 7, 110.0, "evaluation", {"accept_length": 2.75, "step": 40})
    rows, _ = builder.rows_for(evaluation, hello(), definitions, Cursor())
    others, cursor = builder.rows_for(Event("s1", 8, 110.0, "checkpoint"), hello(), definitions, Cursor())

    assert rows == [{"eval/accept_length": 2.75, "eval/step": 40, "time/elapsed_s": 10.0, "_timestamp": 110.0}]
    assert (others, cursor) == ([], Cursor(8))


@pytest.mark.parametrize("record", [STEP, snap(4, 107.5), Event("s1", 4, 107.5, "evaluation", {"accept_length": 2.0})])
def test_a_run_has_one_writer(record: Record) -> None:
    """Records of a rank other than 0 make no rows and move the cursor."""
    assert RowBuilder(15.0, 100.0).rows_for(record, hello(rank=1), definitions, Cursor()) == ([], Cursor(4))


def test_configuration_has_the_topology_and_no_secrets() -> None:
    """W&B gets the trainer's configuration and its devices, without keys that name a secret."""
    config = run_config(
        hello(**{"train.steps": 5, "data.max_tokens": 9, "hub.token": "x", "api_key": "y", "a.password": "z"})
    )

    assert config == {
        "train.steps": 5,
        "data.max_tokens": 9,
        "topology": [{"role": "drafter", "worker": "0", "device": "cuda:1", "uuid": "GPU-1"}],
    }


def test_rows_are_numbered_densely_over_sessions(tmp_path: Path) -> None:
    """Two sessions of one run share one dense sequence, and each has its own cursor; another run starts from 0."""
    spool = Spool(tmp_path / "spool.db")
    spool.append("run", "s1", Cursor(5, 1.5), [{"a": 1}, {"a": 2}])
    spool.append("other", "s2", Cursor(0), [{"b": 1}])
    spool.append("run", "s3", Cursor(2), [{"a": 3}])

    assert spool.rows("run", 0, 10) == [(0, {"a": 1}), (1, {"a": 2}), (2, {"a": 3})]
    assert spool.rows("run", 1, 1) == [(1, {"a": 2})]
    assert spool.rows("other", 0, 10) == [(0, {"b": 1})]
    assert [spool.cursor(s) for s in ("s1", "s2", "s3", "s4")] == [Cursor(5, 1.5), Cursor(0), Cursor(2), Cursor()]
    assert [run.run_id for run in spool.runs()] == ["other", "run"]


def test_every_key_is_remembered(tmp_path: Path) -> None:
    """The keys of all rows ever are kept, also over a reopening, without wandb's own."""
    Spool(tmp_path / "spool.db").append("run", "s1", Cursor(), [{"a": 1, "_timestamp": 2.0}, {"b/c": 1}])

    assert Spool(tmp_path / "spool.db").keys("run") == {"a": False, "b/c": False}


def test_values_survive_as_they_were(tmp_path: Path) -> None:
    """Not-a-number, infinity, large integers and None come back unchanged."""
    spool = Spool(tmp_path / "spool.db")
    row: Row = {"inf": math.inf, "big": 2**60, "none": None, "text": "grüße", "flag": True, "tiny": 5e-324}
    spool.append("run", "s1", Cursor(), [row, {"nan": math.nan}])
    (_, first), (_, second) = spool.rows("run", 0, 2)
    nan = second["nan"]

    assert first == row
    assert isinstance(nan, float)
    assert math.isnan(nan)


def test_failed_append_leaves_neither_rows_nor_cursor(tmp_path: Path) -> None:
    """When a row cannot be stored, nothing of that append is."""
    spool = Spool(tmp_path / "spool.db")
    spool.append("run", "s1", Cursor(0), [{"a": 1}])
    with pytest.raises(TypeError):
        spool.append("run", "s1", Cursor(2), [{"a": 2}, {"a": object()}])  # type: ignore[dict-item]
    spool.append("run", "s1", Cursor(1), [{"a": 3}])

    assert spool.rows("run", 0, 10) == [(0, {"a": 1}), (1, {"a": 3})]
    assert spool.cursor("s1") == Cursor(1)


def test_run_is_over_when_all_its_sessions_are(tmp_path: Path) -> None:
    """The exit code of a run is that of its last session, once all have ended; a new session opens the run again."""
    spool = Spool(tmp_path / "spool.db")
    starts = [spool.open_run(hello("s1", start_time_s=100.0)), spool.open_run(hello("s2", start_time_s=200.0))]
    codes = [spool.run("run").exit_code]
    for session, exit_code in (("s2", 0), ("s1", 7)):
        spool.finish("run", session, exit_code)
        codes.append(spool.run("run").exit_code)
    spool.set_closed("run", 5.0)
    closed = spool.run("run").closed
    spool.open_run(hello("s3"))
    spool.open_run(hello("s4", rank=1))
    reopened = spool.run("run")

    assert starts == [100.0, 100.0]
    assert codes == [None, None, 0]
    assert (closed, reopened.closed, reopened.exit_code) == (True, False, None)


def test_pruned_rows_keep_their_numbers(tmp_path: Path) -> None:
    """Pruning drops the rows of runs closed long ago; a resumed run goes on with the next number."""
    spool = Spool(tmp_path / "spool.db")
    for run_id in ("old", "open"):
        spool.append(run_id, run_id, Cursor(0), [{"a": 1}])
    spool.set_closed("old", 10.0)
    spool.trim(closed_before_s=20.0, max_bytes=10**9)
    spool.append("old", "again", Cursor(0), [{"a": 2}])

    assert spool.rows("old", 0, 10) == [(1, {"a": 2})]
    assert spool.rows("open", 0, 10) == [(0, {"a": 1})]


def test_reader_cannot_write_and_sees_what_is_committed(tmp_path: Path) -> None:
    """A read-only spool follows the writer and refuses to write."""
    writer = Spool(tmp_path / "spool.db")
    writer.append("run", "s1", Cursor(0), [{"a": 1}])
    reader = Spool(tmp_path / "spool.db", read_only=True)
    writer.append("run", "s1", Cursor(1), [{"a": 2}])

    assert [index for index, _ in reader.rows("run", 0, 10)] == [0, 1]
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.set_sent("run", 1)


def test_kill_between_appends_leaves_rows_and_cursor_together(tmp_path: Path) -> None:
    """However a writer is killed, the number of rows and the cursor agree."""
    code = f"""
from pathlib import Path
from sidecar.sinks.wandb_run import Cursor
from sidecar.sinks.wandb_spool import Spool
spool = Spool(Path({str(tmp_path / "spool.db")!r}))
seq = spool.cursor("s1").seq
print("ready", flush=True)
while True:
    spool.append("run", "s1", Cursor(seq + 3), [{{"seq": seq + i}} for i in (1, 2, 3)])
    seq += 3
"""
    for _ in range(3):
        command = [sys.executable, "-c", code]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            with pytest.raises(subprocess.TimeoutExpired):
                writer.wait(0.1)
            os.kill(writer.pid, signal.SIGKILL)
    spool = Spool(tmp_path / "spool.db")
    rows = spool.rows("run", 0, 10**9)

    assert len(rows) > 30
    assert [(index, row["seq"]) for index, row in rows] == [(i, i) for i in range(len(rows))]
    assert spool.cursor("s1").seq == len(rows) - 1


RECORDS = st.lists(st.sampled_from(["step", "snap", "evaluation", "checkpoint"]), min_size=1, max_size=30)


@given(kinds=RECORDS, gaps=st.lists(st.floats(0.0, 9.0), min_size=30, max_size=30), cut=st.integers(0, 30))
def test_interrupted_feed_gives_the_same_rows(kinds: list[str], gaps: list[float], cut: int) -> None:
    """Stopping anywhere and going on from the cursor with a new builder gives the rows of an uninterrupted feed."""
    records: list[Record] = []
    time_s = 100.0
    for seq, kind in enumerate(kinds):
        time_s += gaps[seq]
        if kind == "step":
            records.append(msgspec.structs.replace(STEP, seq=seq, time_s=time_s, step=seq))
        else:
            records.append(
                snap(seq, time_s) if kind == "snap" else Event("s1", seq, time_s, kind, {"accept_length": 1.0})
            )

    def feed(some: list[Record], cursor: Cursor) -> tuple[list[Row], Cursor]:
        builder, rows = RowBuilder(15.0, 100.0), list[Row]()
        for record in some:
            new, cursor = builder.rows_for(record, hello(), definitions, cursor)
            rows += new
        return rows, cursor

    first, cursor = feed(records[:cut], Cursor())
    rest, _ = feed(records[cursor.seq + 1 :], cursor)

    assert first + rest == feed(records, Cursor())[0]
