"""A server that forgets, shows something stale, or loses the run: rows are neither lost nor doubled nor changed."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_wandb import HISTORY, FakeWandb, Run
from wandb_uplink import Uplink, assert_exactly_once, child_basis, row

from sidecar.sinks.wandb_run import Cursor

Bucket = dict[str, Any]


def lines_of(server: FakeWandb) -> dict[int, str]:
    """History lines of the run on the server."""
    return server.run("run").files.setdefault(HISTORY, {})


def upload(uplink: Uplink, server: FakeWandb, num_rows: int) -> None:
    """Upload some rows, until they were seen to have arrived."""
    uplink.add(num_rows)
    uplink.drive(lambda: uplink.state.state == "running" and uplink.state.lag_records == 0)
    assert len(lines_of(server)) == num_rows


def finish(uplink: Uplink, num_more: int) -> None:
    """Add rows, end the trainer, and upload all."""
    uplink.add(num_more)
    uplink.end(0)
    uplink.drive_to_idle()


@pytest.mark.slow
def test_stale_last_row_on_resume(uplink: Uplink, server: FakeWandb) -> None:
    """Summary and last row come from an old cache, the number of rows is right: nothing is sent twice."""
    upload(uplink, server, 60)
    old = server.run("run").lines(HISTORY)[20]
    stale = {"historyTail": json.dumps([old]), "summaryMetrics": old}
    server.bucket_view = lambda bucket: bucket | stale
    uplink.signal_child(signal.SIGKILL)
    finish(uplink, 20)

    assert_exactly_once(server, 80)


def fewer_rows(num: int) -> Callable[[Bucket], Bucket]:
    """A server whose count is too low by so many, with the last row that would go with it."""
    return lambda bucket: bucket | {"historyLineCount": bucket["historyLineCount"] - num}


@pytest.mark.slow
def test_stale_number_of_rows_on_resume(uplink: Uplink, server: FakeWandb) -> None:
    """A server that shows fewer rows than before is not believed at once: the upload waits until it shows them."""
    upload(uplink, server, 60)
    server.bucket_view = fewer_rows(20)
    uplink.signal_child(signal.SIGKILL)
    uplink.drive(lambda: "W&B has 40 rows of this run, it had 60" in uplink.state.detail)
    server.bucket_view = lambda bucket: bucket
    finish(uplink, 20)

    assert_exactly_once(server, 80)


@pytest.mark.slow
@pytest.mark.parametrize("remembers_last_step", [False, True])
def test_server_that_lost_its_last_rows(uplink: Uplink, server: FakeWandb, *, remembers_last_step: bool) -> None:
    """A server that still has fewer rows after a while lost them, and is sent them again."""
    upload(uplink, server, 60)
    for number in range(40, 60):
        del lines_of(server)[number]
    if not remembers_last_step:
        server.run("run").files["wandb-summary.json"] = {0: lines_of(server)[39]}
    uplink.signal_child(signal.SIGKILL)
    finish(uplink, 20)

    if not remembers_last_step:
        assert_exactly_once(server, 80)
    shift = 20 if remembers_last_step else 0
    arrived = [{key: value for key, value in line.items() if key != "_runtime"} for line in server.run("run").history]
    assert arrived == [row(i) | {"_step": i + (shift if i >= 40 else 0)} for i in range(80)]


def test_run_is_deleted_while_rows_flow(uplink: Uplink, server: FakeWandb) -> None:
    """A run that is deleted in the UI is created anew, once, and gets every row from the first one on."""
    upload(uplink, server, 60)
    uplink.rows_per_second = 20.0
    deleted = server.delete("run")
    uplink.drive(lambda: len(lines_of(server)) > 60)
    uplink.rows_per_second = 0.0
    finish(uplink, 0)

    assert len(deleted.lines(HISTORY)) >= 60
    assert_exactly_once(server, uplink.spool.num_rows("run"))
    assert server.run("run").state == "finished"
    assert server.requests.count("UpsertBucket") < 20


@pytest.mark.slow
def test_deleted_run_that_may_not_come_back(tmp_path: Path, server: FakeWandb) -> None:
    """When W&B does not give out the name again, the state says so and rows wait; other runs are not held up."""
    uplink = Uplink(tmp_path, child_basis(server), init_timeout_s=3.0)
    upload(uplink, server, 30)
    server.may_recreate = False
    server.delete("run")
    uplink.drive(lambda: "previously created and deleted" in uplink.state.detail)
    waiting = uplink.state
    uplink.add(20, "other")
    uplink.end(0, "other")
    uplink.drive(lambda: server.run("other").state == "finished")
    uplink.close()

    assert waiting.lag_records == 30
    assert_exactly_once(server, 20, "other")
    assert lines_of(server) == {}


@pytest.mark.slow
def test_run_deleted_after_its_end_stays_deleted(uplink: Uplink, server: FakeWandb) -> None:
    """Nothing brings back a run that was complete and closed when it was deleted."""
    uplink.add(20)
    finish(uplink, 0)
    server.delete("run")
    num_requests = len(server.arrivals)
    uplink.drive_for(2.0)

    assert len(server.arrivals) == num_requests
    assert "run" not in server.runs


def test_identity_of_records_arrives(uplink: Uplink, server: FakeWandb) -> None:
    """The identity of a record reaches the server as it was written."""
    upload(uplink, server, 5)
    run: Run = server.run("run")

    assert [line["_record"] for line in run.history] == [f"run-session:{i}" for i in range(5)]


@pytest.mark.slow
def test_spool_that_forgot_its_last_rows(uplink: Uplink, server: FakeWandb) -> None:
    """After a power cut the spool may lack rows that W&B has: when they are made again they are not sent again."""
    upload(uplink, server, 60)
    uplink.signal_child(signal.SIGKILL)
    uplink.spool._connection.execute("DELETE FROM rows WHERE row_index >= 45")
    uplink.spool._connection.execute("UPDATE runs SET num_rows = 45")
    uplink.spool._connection.execute("UPDATE sessions SET seq = 44")
    uplink.add(5)
    uplink.drive(lambda: "made anew" in uplink.state.detail)
    finish(uplink, 30)

    assert_exactly_once(server, 80)


def test_new_spool_that_numbers_its_rows_otherwise(tmp_path: Path, server: FakeWandb) -> None:
    """A spool made anew with definitions that give other rows goes on behind the record that the server has last."""
    directories = [tmp_path / name for name in ("old", "new")]
    for directory in directories:
        directory.mkdir()
    old = Uplink(directories[0], child_basis(server))
    upload(old, server, 60)
    old.close()
    new = Uplink(directories[1], child_basis(server))
    rows = [row(index) for index in range(90) if index % 3]  # every third is a telemetry row that is no more
    new.spool.append("run", "run-session", Cursor(89), rows)
    new.end(0)
    new.drive_to_idle()
    new.close()

    records = [line["_record"] for line in server.run("run").history]
    assert records == [f"run-session:{i}" for i in range(90) if i < 60 or i % 3]
    assert [line["_step"] for line in server.run("run").history] == list(range(80))
    assert server.run("run").conflicts == []
