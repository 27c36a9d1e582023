"""Every way in which W&B can fail, at the start and while rows flow: each row arrives once, in order, unchanged.

The real wandb against the stand-in server. The cases of one test run side by side, each with a server, a spool and a
supervisor of its own, while rows are appended at a steady pace.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from fake_wandb import HISTORY, FakeWandb
from fake_wandb_http import Fault
from wandb_uplink import Story, Uplink, after, assert_exactly_once, hasty_basis, tell

PASSING = {
    "500": Fault("status", 500),
    "429 with Retry-After": Fault("status", 429, retry_after_s=2),
    "hang": Fault("hang", hang_s=20.0),
    "reset": Fault("reset"),
    "answer lost": Fault("lost answer"),
    "portal": Fault("garbage"),
    "truncated": Fault("truncated"),
    "refused connection": None,
}
"""Faults that wandb tries to sit out."""
FINAL = {f"{status}": Fault("status", status) for status in (401, 403, 404, 409, 413)}
"""Faults after which wandb uploads nothing more until it is started again."""
FAULTS = PASSING | FINAL
OUTAGE_S = 3.0


class Case:
    """One server and its uplink."""

    def __init__(self, directory: Path, fault: Fault | None) -> None:
        directory.mkdir()
        self.fault = fault
        self.server = FakeWandb().start()
        self.uplink = Uplink(directory, hasty_basis(self.server, directory), init_timeout_s=4.0, lease_s=2.0)

    def fail(self, operations: set[str] | None) -> None:
        """Fail these operations, or all."""
        if self.fault is None:
            self.server.close()
        self.server.fault = lambda operation: self.fault if operations is None or operation in operations else None

    def recover(self) -> None:
        """Fail no more."""
        if self.fault is None:
            self.server.start()
        self.server.fault = lambda _operation: None

    def close(self) -> None:
        """End everything."""
        self.uplink.close()
        self.server.close()


def in_parallel(tmp_path: Path, faults: dict[str, Fault | None], story: Callable[[Case], Story]) -> dict[str, Case]:
    """Let every fault have its story, then check what must hold after each."""
    with ExitStack() as stack:
        cases = {name: Case(tmp_path / name.replace(" ", "-"), fault) for name, fault in faults.items()}
        for case in cases.values():
            stack.callback(case.close)
        tell({name: (case.uplink, story(case)) for name, case in cases.items()}, timeout_s=150.0)
        for name, case in cases.items():
            run = case.server.run("run")
            assert case.uplink.spool.num_rows("run") > 60, name
            assert_exactly_once(case.server, case.uplink.spool.num_rows("run"))
            assert (run.state, case.uplink.state.lag_records) == ("failed", 0), name
            assert case.uplink.slowest_tick_s < 0.5, name
    return cases


def to_the_end(case: Case) -> Iterator[Callable[[], bool]]:
    """Rows flow on for a while, the trainer ends with code 3, and all of it arrives."""
    case.recover()
    yield after(1.0)
    case.uplink.rows_per_second = 0.0
    case.uplink.end(3)
    yield lambda: case.uplink.is_idle


def failing_start(operations: set[str] | None) -> Callable[[Case], Story]:
    """The server fails from the beginning, until after it was tried at least once."""

    def story(case: Case) -> Story:
        case.fail(operations)
        case.uplink.rows_per_second = 20.0
        yield after(OUTAGE_S)
        yield lambda: case.uplink.state.state in {"waiting", "refused"} or bool(case.server.runs)
        yield from to_the_end(case)

    return story


def failing_flow(operations: set[str] | None) -> Callable[[Case], Story]:
    """The server fails while rows flow."""

    def story(case: Case) -> Story:
        case.uplink.rows_per_second = 20.0
        yield lambda: bool(case.server.run("run").files)
        case.fail(operations)
        yield after(OUTAGE_S)
        yield from to_the_end(case)

    return story


EVERYTHING = pytest.param(None, id="everything")


@pytest.mark.parametrize(
    "operations", [EVERYTHING, pytest.param({"UpsertBucket"}, id="attaching", marks=pytest.mark.slow)]
)
def test_failing_from_the_start(tmp_path: Path, operations: set[str] | None) -> None:
    """Whatever a new child meets first: the state says that rows wait, and all arrive when the server works."""
    cases = in_parallel(tmp_path, FAULTS, failing_start(operations))

    for name, case in cases.items():
        seen = {state.state for state in case.uplink.states}
        assert seen & {"waiting", "refused"} or name in {"answer lost", "truncated"}, (name, seen)


@pytest.mark.parametrize(
    "operations", [EVERYTHING, pytest.param({"file_stream"}, id="uploads", marks=pytest.mark.slow)]
)
def test_failing_while_rows_flow(tmp_path: Path, operations: set[str] | None) -> None:
    """Whatever happens to a child that uploads."""
    swallowing = {"portal"} if operations else set()
    in_parallel(tmp_path, {k: v for k, v in FAULTS.items() if k not in swallowing}, failing_flow(operations))


@pytest.mark.slow
def test_rows_swallowed_on_the_way_are_counted(tmp_path: Path) -> None:
    """Wandb takes any page with status 200 for W&B's consent: what a portal so swallowed is missing, and is said."""
    case = Case(tmp_path / "portal", Fault("garbage"))
    tell({"portal": (case.uplink, failing_flow({"file_stream"})(case))})
    arrived = [json.loads(line)["train/step"] // 10 for line in case.server.run("run").files[HISTORY].values()]
    num_rows, num_dropped = case.uplink.spool.num_rows("run"), case.uplink.spool.num_dropped
    case.close()

    assert num_dropped > 0
    assert len(set(arrived)) == len(arrived) == num_rows - num_dropped
    assert (case.server.run("run").state, case.uplink.state.lag_records) == ("failed", 0)
