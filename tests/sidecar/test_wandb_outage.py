"""Long outages with the clock compressed, limits of the spool, and how W&B wants to be treated."""

import contextlib
import itertools
import os
import signal
from pathlib import Path

import pytest
from fake_wandb import HISTORY, FakeWandb
from fake_wandb_http import Fault
from wandb_uplink import Story, Uplink, after, assert_exactly_once, child_basis, hasty_basis, tell

HASTE = {"look_interval_s": 0.3, "look_timeout_s": 1.0, "lease_s": 1.0, "init_timeout_s": 2.0, "max_backoff_s": 1.0}


def size_bytes(directory: Path) -> int:
    """Bytes of all files in a directory."""
    total = 0
    for folder, _, names in os.walk(directory):  # a folder that goes meanwhile is no error here
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(folder) / name).stat().st_size
    return total


def memory_bytes(pid: int | None) -> int:
    """Resident memory of a process and what it started."""
    if pid is None:
        return 0
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(memory_bytes(int(child)) for child in children)


@pytest.fixture(params=[pytest.param(1, id="short"), pytest.param(6, id="long", marks=pytest.mark.slow)])
def scale(request: pytest.FixtureRequest) -> int:
    """How much longer than the shortest."""
    factor: int = request.param
    return factor


def test_long_outage(tmp_path: Path, server: FakeWandb, scale: int) -> None:
    """Thousands of rows wait in the spool alone while W&B is away, then drain; memory and other files stay small."""
    uplink = Uplink(tmp_path, child_basis(server), **HASTE)
    most = {"memory": 0, "wandb": 0}

    def story() -> Story:
        uplink.rows_per_second = 500.0
        yield lambda: bool(server.run("run").files.get(HISTORY))
        server.close()
        end = after(8.0 * scale)

        def measured() -> bool:
            most["memory"] = max(most["memory"], memory_bytes(uplink.child_pid))
            most["wandb"] = max(most["wandb"], size_bytes(tmp_path / "wandb"))
            return end()

        yield measured
        uplink.rows_per_second = 0.0
        most["spool"] = size_bytes(tmp_path) - size_bytes(tmp_path / "wandb")
        server.start()
        uplink.end(0)
        yield lambda: uplink.is_idle

    tell({"outage": (uplink, story())}, timeout_s=60.0 + 30.0 * scale)
    uplink.close()
    num_rows = len(server.run("run").files[HISTORY])
    print({"rows": num_rows, **most, "slowest_tick_s": uplink.slowest_tick_s})  # noqa: T201

    assert num_rows > 3000 * scale
    assert_exactly_once(server, num_rows)
    assert most["memory"] < 400e6
    assert most["wandb"] < 20e6
    assert most["spool"] < num_rows * 1000 + 1e6
    assert uplink.slowest_tick_s < 0.5


@pytest.mark.slow
def test_retry_after_is_obeyed(tmp_path: Path, server: FakeWandb) -> None:
    """After 429 with Retry-After no upload is tried before that time, while rows go on being taken."""
    uplink = Uplink(tmp_path, child_basis(server))
    refused_s: list[float] = []

    def limit(operation: str) -> Fault | None:
        if operation != "file_stream" or len(refused_s) >= 2:
            return None
        refused_s.append(server.arrivals[-1][0])
        return Fault("status", 429, retry_after_s=4)

    uplink.rows_per_second = 20.0
    server.fault = limit
    uplink.drive(lambda: len(server.run("run").files.get(HISTORY, {})) > 0)
    uplink.rows_per_second = 0.0
    uplink.end(0)
    uplink.drive_to_idle()
    num_rows = uplink.spool.num_rows("run")
    uplink.close()
    uploads_s = [time_s for time_s, operation in server.arrivals if operation == "file_stream"][:3]

    assert uploads_s[:2] == refused_s
    assert all(later - earlier >= 4.0 for earlier, later in itertools.pairwise(uploads_s))
    assert_exactly_once(server, num_rows)


@pytest.mark.slow
def test_init_that_hangs_for_ever(tmp_path: Path, server: FakeWandb) -> None:
    """A child whose init never returns is killed after its deadline and replaced, as often as it takes."""
    uplink = Uplink(tmp_path, child_basis(server), init_timeout_s=600.0, hang_timeout_s=2.5)
    server.fault = lambda operation: Fault("hang") if operation == "UpsertBucket" else None
    children: set[int | None] = set()

    def story() -> Story:
        uplink.rows_per_second = 20.0
        yield lambda: (children.add(uplink.child_pid) or len(children - {None})) == 3
        server.fault = lambda _operation: None
        uplink.rows_per_second = 0.0
        uplink.end(0)
        yield lambda: uplink.is_idle

    tell({"init": (uplink, story())})
    num_rows = uplink.spool.num_rows("run")
    uplink.close()

    assert any("made no progress for 2.5 s" in state.detail for state in uplink.states)
    assert uplink.slowest_tick_s < 0.5
    assert_exactly_once(server, num_rows)


@pytest.mark.slow
def test_finish_that_hangs(tmp_path: Path, server: FakeWandb) -> None:
    """A finish that cannot send what is left ends in its time, for a restart as for the end; nothing is lost."""
    uplink = Uplink(tmp_path, child_basis(server), finish_timeout_s=2.0)
    uplink.add(50)
    uplink.drive_to_sent()
    server.fault = lambda operation: Fault("hang") if operation == "file_stream" else None
    uplink.add(50)
    uplink.end(5)
    uplink.drive(lambda: "could not be sent in time" in uplink.state.detail)
    server.fault = lambda _operation: None
    uplink.drive_to_idle()
    uplink.close()

    assert uplink.slowest_tick_s < 0.5
    assert_exactly_once(server, 100)
    assert (server.run("run").state, server.run("run").exit_code) == ("failed", 5)


def test_end_that_the_server_refuses(tmp_path: Path, server: FakeWandb) -> None:
    """A run whose end was refused, which wandb keeps to itself, is not taken for closed: it is tried again."""
    uplink = Uplink(tmp_path, child_basis(server), look_timeout_s=1.0)
    uplink.add(50)
    uplink.end(5)
    uplink.drive(lambda: uplink.child_pid is None and uplink.spool.run("run").num_confirmed == 50)
    server.fault = lambda operation: Fault("status", 403) if operation == "file_stream" else None
    uplink.drive(lambda: "does not mark the run as ended" in uplink.state.detail)
    closed_meanwhile = uplink.spool.run("run").closed
    server.fault = lambda _operation: None
    uplink.drive_to_idle()
    uplink.close()

    assert not closed_meanwhile
    assert (server.run("run").state, server.run("run").exit_code) == ("failed", 5)


@pytest.mark.slow
def test_fatal_error_in_a_run_that_was_stopped_in_the_ui(tmp_path: Path, server: FakeWandb) -> None:
    """Stop in the UI concerns us no further, and hides no end of uploading: that rows do not arrive is noticed."""
    uplink = Uplink(tmp_path, hasty_basis(server, tmp_path), stall_s=2.0)
    server.run("run").stop_requested = True
    uplink.add(20)
    uplink.drive(lambda: "stop was requested in the W&B UI" in uplink.state.detail)
    server.fault = lambda operation: Fault("status", 403) if operation == "file_stream" else None
    uplink.rows_per_second = 20.0
    uplink.drive(lambda: "has taken no row for 2 s" in uplink.state.detail)
    server.fault = lambda _operation: None
    uplink.rows_per_second = 0.0
    uplink.end(0)
    uplink.drive_to_idle()
    num_rows = uplink.spool.num_rows("run")
    uplink.close()

    assert num_rows > 40
    assert_exactly_once(server, num_rows)
    assert server.run("run").state == "finished"


@pytest.mark.slow
def test_full_spool_drops_what_w_and_b_has_first(tmp_path: Path, server: FakeWandb) -> None:
    """Over its limit the spool drops what W&B has, uncounted; what it must drop of rows that wait, it counts."""
    uplink = Uplink(tmp_path, child_basis(server))
    uplink.add(3000)
    uplink.drive(lambda: uplink.state.state == "running" and uplink.state.lag_records == 0)
    uplink.signal_child(signal.SIGKILL)
    server.close()
    uplink.add(4000)
    while uplink.spool.trim(closed_before_s=0.0, max_bytes=600_000):
        pass
    dropped, first = uplink.spool.num_dropped, uplink.spool.first_row("run")
    server.start()
    uplink.end(0)
    uplink.drive_to_idle()
    uplink.close()

    assert dropped == first - 3000 > 0
    numbers = [line["train/step"] // 10 for line in server.run("run").history]
    assert numbers == [*range(3000), *range(first, 7000)]
    assert [line["_step"] for line in server.run("run").history] == list(range(len(numbers)))


def test_waiting_rows_are_bounded_without_credentials(tmp_path: Path, server: FakeWandb) -> None:
    """Rows that wait for a key are bounded too; those that are left are uploaded from step 0 when there is one."""
    keyless = Uplink(tmp_path, {"PATH": os.environ["PATH"], "HOME": str(tmp_path)})
    for _ in range(5):
        keyless.add(2000)
        keyless.tick()
        while keyless.spool.trim(closed_before_s=0.0, max_bytes=600_000):
            pass
    used, dropped, first = size_bytes(tmp_path), keyless.spool.num_dropped, keyless.spool.first_row("run")
    keyless.close()
    uplink = Uplink(tmp_path, child_basis(server))
    uplink.end(0)
    uplink.drive_to_idle()
    uplink.close()

    assert keyless.state.state == "no-credentials"
    assert dropped == first > 5000
    assert used < 6e6
    assert [line["train/step"] // 10 for line in server.run("run").history] == list(range(first, 10_000))
    assert [line["_step"] for line in server.run("run").history] == list(range(10_000 - first))
