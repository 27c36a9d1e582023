"""Threads that start, fail and stop together."""

import threading
import time
import traceback
from pathlib import Path

import pytest

from trainer.hidden_queue import QueueClosedError
from trainer.stopping import Stop
from trainer.supervisor import Supervisor


def test_first_failure_wins_and_stops_the_rest() -> None:
    """1. One worker fails. 2. The others see the stop. Result: its own error and traceback, soon."""
    stop, aborted = Stop(), threading.Event()

    def explode() -> None:
        raise RuntimeError("tapped layer caught fire")

    def wait_for_stop() -> None:
        while not stop.requested():
            time.sleep(0.01)
        raise QueueClosedError("a consequence, not a cause")

    with pytest.raises(RuntimeError, match="tapped layer caught fire") as caught:
        Supervisor(stop, aborted.set).run({"a": explode, "b": wait_for_stop}, watch=lambda: None)

    assert aborted.is_set()
    assert "explode" in "".join(traceback.format_tb(caught.value.__traceback__))


def test_run_ends_when_all_workers_have() -> None:
    """Without a failure nothing is aborted and `watch` was called."""
    stop, watched = Stop(), threading.Event()

    Supervisor(stop, pytest.fail).run({"a": lambda: None}, watch=watched.set)

    assert watched.is_set()
    assert not stop.requested()


def test_workers_carry_their_names_in_the_kernel() -> None:
    """What the kernel calls a worker's thread is the worker's name."""
    seen: list[str] = []

    def look() -> None:
        seen.append(Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip())

    Supervisor(Stop(), lambda: None).run({"target-0": look}, watch=lambda: None)

    assert seen == ["target-0"]


def test_hung_worker_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that ignores the stop is reported by name instead of being waited for."""
    monkeypatch.setattr("trainer.supervisor.JOIN_TIMEOUT_S", 0.1)
    stop, release = Stop(), threading.Event()
    stop.request()

    with pytest.raises(TimeoutError, match="target-0"):
        Supervisor(stop, lambda: None).run({"target-0": lambda: release.wait() and None}, watch=lambda: None)
    release.set()
