"""`dflash-sidecar push`: uploads what waits, and ends."""

import threading
from pathlib import Path

from fake_wandb import FakeWandb
from fake_wandb_http import Fault
from wandb_uplink import FAST, Uplink, assert_exactly_once, child_basis

from sidecar.sinks.wandb_push import push


def test_push_sends_everything_and_ends(uplink: Uplink, server: FakeWandb) -> None:
    """Push sends what is there, closes what is over, leaves a living run running, and returns 0; twice is harmless."""
    uplink.add(20, "over")
    uplink.end(3, "over")
    uplink.add(20, "alive")
    said: list[str] = []
    codes = [push(uplink.path, FAST, child_basis(server), said.append) for _ in range(2)]

    assert codes == [0, 0]
    assert said[-1] == "idle: 0 rows left"
    assert {run_id: (len(run.history), run.state) for run_id, run in server.runs.items()} == {
        "alive": (20, "running"),
        "over": (20, "failed"),
    }


def test_push_that_cannot_work_says_why(uplink: Uplink, server: FakeWandb, tmp_path: Path) -> None:
    """Without a spool, without a key, or with a key that is refused, push returns 1 and says what to do."""
    uplink.add(10)
    environ = child_basis(server)
    said: list[str] = []
    codes = [push(tmp_path / "none.db", FAST, environ, said.append)]
    keyless = {"PATH": environ["PATH"], "HOME": str(tmp_path)}
    codes.append(push(uplink.path, FAST, keyless, said.append))
    server.fault = lambda operation: Fault("status", 401) if operation == "UpsertBucket" else None
    codes.append(push(uplink.path, FAST, environ, said.append))

    assert codes == [1, 1, 1]
    assert "none.db: no such spool" in said[0]
    assert "set WANDB_API_KEY" in said[1]
    assert said[-1].startswith("refused: 10 rows left")


def test_push_of_a_run_that_another_sidecar_uploads(tmp_path: Path, server: FakeWandb) -> None:
    """Push gives up on a run that somebody else writes, with the remedy, and one that was deleted it uploads again."""
    (tmp_path / "other").mkdir()
    other = Uplink(tmp_path / "other", child_basis(server))
    uplink = Uplink(tmp_path, child_basis(server))
    other.add(10)
    other.drive_to_sent()
    uplink.add(20)
    said: list[str] = []
    codes: list[int] = []
    pushing = threading.Thread(
        target=lambda: codes.append(push(uplink.path, uplink.settings, child_basis(server), said.append))
    )
    pushing.start()
    other.rows_per_second = 10.0
    other.drive(lambda: not pushing.is_alive())
    num_rows = other.spool.num_rows("run")
    other.close()
    server.delete("run")
    codes.append(push(other.path, other.settings, child_basis(server), said.append))
    uplink.close()

    assert codes == [1, 0]
    assert any(line.startswith("conflict: 20 rows left") and "wandb.mode=off" in line for line in said)
    assert_exactly_once(server, num_rows)
