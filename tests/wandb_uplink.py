"""Drives a spool and its supervisor against the stand-in server, as the daemon's main loop would."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from fake_wandb import FakeWandb

from sidecar.sinks.wandb_run import Cursor, Row
from sidecar.sinks.wandb_settings import WandbSettings
from sidecar.sinks.wandb_spool import Spool
from sidecar.sinks.wandb_supervisor import SinkState, WandbSupervisor

ROOT = Path(__file__).parent.parent
FAST = WandbSettings(
    transmit_interval_s=1,
    init_timeout_s=15.0,
    finish_timeout_s=5.0,
    min_backoff_s=0.1,
    max_backoff_s=0.5,
    refused_backoff_s=0.5,
    look_interval_s=0.5,
    look_timeout_s=2.0,
    lease_s=6.0,
    quiet_s=1.0,
    stall_s=20.0,
)


def child_basis(server: FakeWandb) -> dict[str, str]:
    """An environment in which wandb uses the server and Python finds our packages."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    return ours | server.environment | {"PYTHONPATH": str(ROOT)}


def hasty_basis(server: FakeWandb, directory: Path) -> dict[str, str]:
    """The same, with wandb asking every second instead of every 15 whether it has been stopped."""
    patch = (
        "from wandb.sdk.lib.run_stopping import RunStopChecker as c\nc.__init__.__kwdefaults__['poll_interval'] = 1.0\n"
    )
    (directory / "hasty").mkdir(exist_ok=True)
    (directory / "hasty" / "sitecustomize.py").write_text(patch)
    return child_basis(server) | {"PYTHONPATH": f"{directory / 'hasty'}{os.pathsep}{ROOT}"}


def row(index: int, run_id: str = "run") -> Row:
    """The row that belongs to a number."""
    return {
        "_record": f"{run_id}-session:{index}",
        "train/step": 10 * index,
        "train/loss": 1.0 / (index + 1),
        "time/elapsed_s": float(index),
        "_timestamp": 1e9 + index,
    }


def assert_exactly_once(server: FakeWandb, num_rows: int, run_id: str = "run") -> None:
    """The server has rows 0 to num_rows - 1, each once, in order, as they were spooled, and none was ever changed."""
    run = server.run(run_id)
    arrived = [{key: value for key, value in line.items() if key != "_runtime"} for line in run.history]
    assert arrived == [row(index, run_id) | {"_step": index} for index in range(num_rows)]
    assert run.conflicts == []


Story = Iterator[Callable[[], bool]]
"""What happens to an uplink: it goes on when the condition it yielded holds."""


def tell(stories: Mapping[str, tuple["Uplink", Story]], timeout_s: float = 90.0) -> None:
    """Tick many uplinks at once, each in its own story, until all stories have ended."""
    deadline_s = time.monotonic() + timeout_s
    waiting_for = {name: next(story) for name, (_, story) in stories.items()}
    while waiting_for:
        late = {name: stories[name][0].states[-3:] for name in waiting_for}
        assert time.monotonic() < deadline_s, late
        for name, condition in list(waiting_for.items()):
            uplink, story = stories[name]
            uplink.tick()
            if condition():
                following = next(story, None)
                if following is None:
                    del waiting_for[name]
                else:
                    waiting_for[name] = following
        time.sleep(0.02)


def after(duration_s: float) -> Callable[[], bool]:
    """Hold once a time has passed."""
    end_s = time.monotonic() + duration_s
    return lambda: time.monotonic() > end_s


class Uplink:
    """One run of a spool, and a supervisor that is ticked.

    Args:
        directory: the state directory.
        environ: the sidecar's environment.
        settings: changes to `FAST`.
    """

    def __init__(self, directory: Path, environ: Mapping[str, str], **settings: Any) -> None:
        self.path = directory / "spool.db"
        self.spool = Spool(self.path)
        self.environ = environ
        self.settings = msgspec.structs.replace(FAST, **settings)
        self.supervisor = WandbSupervisor(self.path, self.settings, environ)
        self.states: list[SinkState] = []
        self.slowest_tick_s = 0.0
        self.rows_per_second = 0.0
        """Pace at which ticks append rows to the run named "run"."""
        self.children: set[int] = set()
        """Every uploading process that there was."""
        self._num_due = 0.0
        self._ticked_s = time.monotonic()

    def add(self, num_rows: int, run_id: str = "run") -> None:
        """Append the next rows of a run."""
        first = self.spool.num_rows(run_id)
        rows = [row(index, run_id) for index in range(first, first + num_rows)]
        self.spool.append(run_id, f"{run_id}-session", Cursor(first + num_rows - 1), rows)

    def end(self, exit_code: int, run_id: str = "run") -> None:
        """Say goodbye."""
        self.spool.finish(run_id, f"{run_id}-session", exit_code)

    def drive(self, until: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Tick until the condition holds."""
        deadline_s = time.monotonic() + timeout_s
        while not until():
            assert time.monotonic() < deadline_s, self.states[-3:]
            self.tick()
            time.sleep(0.02)

    def drive_for(self, duration_s: float) -> None:
        """Tick for a while."""
        end_s = time.monotonic() + duration_s
        self.drive(lambda: time.monotonic() > end_s)

    def drive_to_sent(self) -> None:
        """Tick until a child runs and has been handed every row."""
        self.drive(lambda: self.state.state == "running" and self.num_waiting == 0)

    @property
    def num_waiting(self) -> int:
        """Rows that no child was handed."""
        return sum(run.num_waiting for run in self.spool.open_runs())

    def drive_to_idle(self, timeout_s: float = 60.0) -> None:
        """Tick until there is nothing left to do."""
        self.drive(lambda: self.is_idle, timeout_s)

    def tick(self) -> None:
        """One turn of the daemon's main loop."""
        started_s = time.monotonic()
        self._num_due += (started_s - self._ticked_s) * self.rows_per_second
        self._ticked_s = started_s
        if self._num_due >= 1.0:
            self.add(int(self._num_due))
            self._num_due %= 1.0
            started_s = time.monotonic()
        self.supervisor.tick(started_s)
        if self.child_pid is not None:
            self.children.add(self.child_pid)
        self.slowest_tick_s = max(self.slowest_tick_s, time.monotonic() - started_s)
        if not self.states or self.states[-1] != self.supervisor.state():
            self.states.append(self.supervisor.state())

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing left to do."""
        return self.child_pid is None and self.state.state == "idle"

    @property
    def state(self) -> SinkState:
        """The newest state."""
        return self.states[-1] if self.states else SinkState("", 0)

    @property
    def child_pid(self) -> int | None:
        """The uploading process."""
        child = self.supervisor._child
        return None if child is None else child.process.pid

    def signal_child(self, number: signal.Signals) -> None:
        """Do something to the uploading process."""
        assert self.child_pid is not None
        os.kill(self.child_pid, number)

    def restart(self) -> None:
        """Restart the sidecar in an orderly way."""
        self.supervisor.close()
        self.supervisor = WandbSupervisor(self.path, self.settings, self.environ)

    def close(self) -> None:
        """End everything."""
        self.supervisor.close()
        self.spool.close()
