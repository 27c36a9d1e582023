"""Two sidecars for one run: one uploads, the other says so and stays out, until the first one is gone."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_wandb import HISTORY, FakeWandb
from wandb_uplink import Story, Uplink, after, assert_exactly_once, child_basis, tell


class Pair:
    """Two uplinks with state directories of their own, whose rows come from the same records."""

    def __init__(self, directory: Path, server: FakeWandb) -> None:
        self.server = server
        self.directory = directory
        self.first = self._uplink("first")
        self.second = self._uplink("second")

    @property
    def num_arrived(self) -> int:
        """Rows on the server."""
        return len(self.server.run("run").files.get(HISTORY, {}))

    def _uplink(self, name: str) -> Uplink:
        (self.directory / name).mkdir()
        return Uplink(self.directory / name, child_basis(self.server))

    def tell(self, first: Story, second: Story) -> None:
        """Both stories at once."""
        tell({"first": (self.first, first), "second": (self.second, second)}, timeout_s=60.0)

    def close(self) -> None:
        """End both."""
        self.first.close()
        self.second.close()


@pytest.fixture
def pair(tmp_path: Path, server: FakeWandb) -> Iterator[Pair]:
    """Two uplinks for one run."""
    pair = Pair(tmp_path, server)
    yield pair
    pair.close()


def test_second_sidecar_stays_out(pair: Pair, server: FakeWandb) -> None:
    """While one sidecar uploads, another one for the same run uploads nothing and says what to do about it."""
    seen_by_second: list[str] = []

    def first() -> Story:
        pair.first.rows_per_second = 20.0
        yield lambda: pair.second.state.state == "conflict"
        yield after(3.0)
        pair.first.rows_per_second = 0.0
        pair.first.end(0)
        yield lambda: pair.first.is_idle
        assert_exactly_once(server, pair.first.spool.num_rows("run"))

    def second() -> Story:
        yield lambda: pair.num_arrived > 20
        pair.second.rows_per_second = 20.0
        yield lambda: pair.second.state.state == "conflict"
        yield lambda: pair.first.is_idle
        seen_by_second.extend(state.state for state in pair.second.states)

    pair.tell(first(), second())

    assert set(seen_by_second) <= {"idle", "starting", "waiting", "conflict"}
    assert "wandb.mode=off" in pair.second.state.detail
    assert {state.state for state in pair.first.states} <= {"idle", "starting", "running"}
    assert pair.second.spool.run("run").num_confirmed == 0


def test_second_sidecar_takes_over_from_a_dead_one(pair: Pair, server: FakeWandb) -> None:
    """When the other one is gone for good, the run goes on exactly behind its last row."""
    pair.first.add(40)
    pair.first.drive(lambda: pair.num_arrived == 40)
    pair.first.signal_child(signal.SIGKILL)
    pair.second.add(30)
    pair.second.drive(lambda: "wandb.mode=off" in pair.second.state.detail)
    while_waiting = pair.second.state.state
    pair.second.add(50)
    pair.second.end(0)
    pair.second.drive_to_idle()

    assert while_waiting == "waiting"
    assert_exactly_once(server, 80)
    assert server.run("run").state == "finished"


@pytest.mark.slow
def test_sidecar_that_slept_does_not_write_into_what_was_taken_over(pair: Pair, server: FakeWandb) -> None:
    """A child that wakes up after another sidecar took its run over sees it, and uploads no more."""
    pair.first.add(40)
    pair.first.drive_to_sent()
    pair.first.drive(lambda: pair.num_arrived == 40)
    pair.first.signal_child(signal.SIGSTOP)
    pair.second.add(60)
    pair.second.drive(lambda: pair.num_arrived == 60)
    pair.first.signal_child(signal.SIGCONT)
    pair.first.drive(lambda: pair.first.state.state == "conflict")
    pair.second.rows_per_second = 20.0
    pair.second.drive_for(4.0)
    pair.second.rows_per_second = 0.0
    pair.second.end(0)
    pair.second.drive_to_idle()

    assert "another sidecar" in pair.first.state.detail
    assert_exactly_once(server, pair.second.spool.num_rows("run"))


@pytest.mark.slow
def test_two_that_start_at_once(pair: Pair, server: FakeWandb) -> None:
    """Two sidecars that find a new run at the same moment: one of them ends in conflict, and no row is wrong."""
    in_conflict: list[Uplink] = []

    def story(uplink: Uplink) -> Story:
        uplink.rows_per_second = 20.0
        yield lambda: any(u.state.state == "conflict" for u in (pair.first, pair.second))
        in_conflict.extend(u for u in (pair.first, pair.second) if u.state.state == "conflict")
        yield after(6.0)
        uplink.rows_per_second = 0.0
        uplink.end(0)
        yield lambda: pair.first.is_idle or pair.second.is_idle

    pair.tell(story(pair.first), story(pair.second))
    winner = pair.first if pair.first.is_idle else pair.second

    assert in_conflict
    assert_exactly_once(server, winner.spool.num_rows("run"))


@pytest.mark.slow
def test_copy_of_a_state_directory_is_another_spool(pair: Pair, server: FakeWandb, tmp_path: Path) -> None:
    """A copied spool does not pass for the original: it stays out as long as that one uploads."""
    pair.first.add(40)
    pair.first.drive(lambda: pair.num_arrived == 40)
    pair.second.close()
    shutil.rmtree(tmp_path / "second")
    shutil.copytree(tmp_path / "first", tmp_path / "second", ignore=shutil.ignore_patterns("wandb"))
    pair.second = Uplink(tmp_path / "second", child_basis(server))

    def first() -> Story:
        pair.first.rows_per_second = 20.0
        yield lambda: pair.second.state.state == "conflict"
        pair.first.rows_per_second = 0.0
        pair.first.end(0)
        yield lambda: pair.first.is_idle

    def second() -> Story:
        pair.second.add(30)
        yield lambda: pair.second.state.state == "conflict"

    pair.tell(first(), second())

    assert_exactly_once(server, pair.first.spool.num_rows("run"))
