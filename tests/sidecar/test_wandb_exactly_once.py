"""The real wandb against the stand-in server: every row exactly once and in order, whatever is killed or fails."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fake_wandb import FakeWandb, Fault
from wandb_uplink import ROOT, Uplink, assert_exactly_once, child_basis, row

from sidecar.sinks.wandb_run import Cursor


def num_arrived(server: FakeWandb) -> int:
    """How many rows the server has."""
    return len(server.run("run").files.get("wandb-history.jsonl", {}))


def test_rows_arrive_as_they_were_spooled(uplink: Uplink, server: FakeWandb) -> None:
    """Rows spooled before and while a child runs arrive once, in order; none is lost when the run ends."""
    uplink.add(100)
    uplink.drive(lambda: uplink.state.state == "running")
    uplink.add(50)
    uplink.end(0)
    uplink.drive_to_idle()

    assert_exactly_once(server, 150)
    assert uplink.state.lag_records == 0


def test_child_killed_again_and_again(uplink: Uplink, server: FakeWandb) -> None:
    """Killing the child with -9 while rows are coming, five times, costs nothing and repeats nothing."""
    kills, next_kill_s = 0, time.monotonic() + 1.5

    def killed_enough() -> bool:
        nonlocal kills, next_kill_s
        uplink.add(2)
        if uplink.state.state == "running" and time.monotonic() > next_kill_s:
            uplink.signal_child(signal.SIGKILL)
            kills += 1
            next_kill_s = time.monotonic() + 1.6 + 0.3 * kills
        return kills == 5

    uplink.drive(killed_enough, timeout_s=30.0)
    uplink.end(0)
    uplink.drive_to_idle()

    assert uplink.spool.num_rows("run") > 200
    assert_exactly_once(server, uplink.spool.num_rows("run"))


PARENT = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, "tests")
from wandb_uplink import Uplink
uplink = Uplink(Path(sys.argv[1]), os.environ)
print("up", flush=True)
while uplink.spool.num_rows("run") < 1200 or uplink.spool.open_runs():
    if uplink.spool.num_rows("run") < 1200:
        uplink.add(2)
    elif uplink.spool.run("run").exit_code is None:
        uplink.end(0)
    uplink.tick()
    time.sleep(0.02)
uplink.close()
"""


def test_parent_killed_again_and_again(tmp_path: Path, server: FakeWandb) -> None:
    """Killing the whole sidecar with -9 takes its child along; the next one goes on from what the server has."""
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    num_arrived_at_kill = []
    for _ in range(3):
        with subprocess.Popen(command, cwd=ROOT, env=child_basis(server), stdout=subprocess.PIPE) as parent:
            assert parent.stdout is not None
            parent.stdout.readline()
            before, deadline_s = num_arrived(server), time.monotonic() + 15.0
            while num_arrived(server) == before and time.monotonic() < deadline_s:
                time.sleep(0.05)
            children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
            os.kill(parent.pid, signal.SIGKILL)
        num_arrived_at_kill.append(num_arrived(server))
        time.sleep(0.3)
        assert [pid for pid in children if is_running(pid)] == []
    subprocess.run(command, cwd=ROOT, env=child_basis(server), check=True, timeout=90.0)

    assert num_arrived_at_kill == sorted(set(num_arrived_at_kill))
    assert_exactly_once(server, 1200)
    assert server.run("run").state == "finished"


def is_running(pid: str) -> bool:
    """Whether a process is there and not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def every_other(fault: Fault) -> Callable[[str], Fault | None]:
    """Fail every second upload of rows."""
    count = 0

    def decide(operation: str) -> Fault | None:
        nonlocal count
        count += operation == "file_stream"
        return fault if operation == "file_stream" and count % 2 else None

    return decide


def test_lost_answers(uplink: Uplink, server: FakeWandb) -> None:
    """Uploads that took effect but whose answer never came are sent again, and leave each row there once."""
    server.fault = every_other(Fault("lost answer"))
    uplink.add(50)
    for _ in range(3):
        uplink.drive_for(1.0)
        uplink.add(50)
    uplink.end(0)
    uplink.drive_to_idle()

    assert server.requests.count("file_stream") >= 4
    assert_exactly_once(server, 200)


def test_kills_and_faults_together(uplink: Uplink, server: FakeWandb) -> None:
    """Answers get lost, the server fails, and the child is killed in between: still every row once."""
    for number, fault in enumerate([Fault("lost answer"), Fault("status", 503), Fault("reset")]):
        server.fault = every_other(fault)
        uplink.add(60)
        uplink.drive_to_sent()
        uplink.drive_for(1.0 + 0.3 * number)
        uplink.signal_child(signal.SIGKILL)
        uplink.drive(lambda: uplink.state.state != "running")
    server.fault = lambda _operation: None
    uplink.end(0)
    uplink.drive_to_idle()

    assert_exactly_once(server, 180)


def test_stopped_child_is_killed_and_replaced(tmp_path: Path, server: FakeWandb) -> None:
    """A child that makes no progress (SIGSTOP) never blocks a tick, is killed after its deadline, and loses nothing."""
    uplink = Uplink(tmp_path, child_basis(server), hang_timeout_s=3.0)
    uplink.add(50)
    uplink.drive_to_sent()
    stopped = uplink.child_pid
    uplink.signal_child(signal.SIGSTOP)
    uplink.add(50)
    uplink.drive(lambda: uplink.child_pid not in {stopped, None})
    uplink.end(0)
    uplink.drive_to_idle()
    uplink.close()

    assert any("made no progress for 3 s" in state.detail for state in uplink.states)
    assert uplink.slowest_tick_s < 0.5
    assert_exactly_once(server, 100)


def test_orderly_restart(uplink: Uplink, server: FakeWandb) -> None:
    """Restarting the sidecar sends what is in hand, leaves the run running, and goes on behind it."""
    uplink.add(80)
    uplink.drive_to_sent()
    uplink.restart()
    after_restart = num_arrived(server)
    state_between = server.run("run").state
    uplink.add(20)
    uplink.end(0)
    uplink.drive_to_idle()

    assert (after_restart, state_between) == (80, "running")
    assert_exactly_once(server, 100)


def test_child_is_recycled(tmp_path: Path, server: FakeWandb) -> None:
    """After its share of rows a child makes way for a new one, which goes on exactly where it ended."""
    uplink = Uplink(tmp_path, child_basis(server), max_rows=100)
    uplink.add(250)
    uplink.end(0)
    uplink.drive_to_idle()
    uplink.close()

    assert len(uplink.children) == 4
    assert_exactly_once(server, 250)


def test_run_continued_elsewhere_goes_on_behind_what_the_server_has(tmp_path: Path, server: FakeWandb) -> None:
    """A later session of a run, on a machine whose spool never had the earlier ones, is appended to their rows."""
    old = Uplink(tmp_path, child_basis(server))
    old.add(30)
    old.drive_to_sent()
    old.close()
    (tmp_path / "new").mkdir()
    new = Uplink(tmp_path / "new", child_basis(server))
    new.spool.append("run", "later", Cursor(19), [row(i) | {"_record": f"later:{i}"} for i in range(20)])
    new.drive_to_sent()
    new.signal_child(signal.SIGKILL)
    new.spool.finish("run", "later", 0)
    new.drive_to_idle()
    new.close()

    steps = [(line["_step"], line["train/step"]) for line in server.run("run").history]
    assert steps == [(i, 10 * i) for i in range(30)] + [(30 + i, 10 * i) for i in range(20)]


def test_clock_of_the_machine_is_stepped(uplink: Uplink, server: FakeWandb) -> None:
    """Times that jump by hours, back and forth, across a kill: rows stay in their order and keep their times."""
    shifts_s = [0.0, 21_600.0, -43_200.0, 3_600.0]
    expected = []
    for number, shift_s in enumerate(shifts_s):
        rows = [row(i) | {"_timestamp": 1e9 + i + shift_s} for i in range(20 * number, 20 * number + 20)]
        expected += rows
        uplink.spool.append("run", "run-session", Cursor(20 * number + 19), rows)
        uplink.drive_to_sent()
        if number == 2:
            uplink.signal_child(signal.SIGKILL)
    uplink.end(0)
    uplink.drive_to_idle()

    arrived = [{key: value for key, value in line.items() if key != "_runtime"} for line in server.run("run").history]
    assert arrived == [each | {"_step": index} for index, each in enumerate(expected)]
