"""Processes of the benchmarks: they stand still together, go on together, and none is left behind."""

import signal
import time
from collections.abc import Iterator

import psutil
import pytest
from sidecar_process import wait_for

from bench.workplace import BenchmarkError, Workplace, family_of, send_signal

PARENT = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
CHILD = "import time; time.sleep(600)"


@pytest.fixture
def place() -> Iterator[Workplace]:
    """An empty place."""
    with Workplace() as place:
        yield place


def family(place: Workplace) -> list[psutil.Process]:
    """A process with a child."""
    parent = place.popen(("-c", PARENT.format(child=CHILD)))
    wait_for(lambda: len(family_of(parent.pid)) == 2, "a child")
    return family_of(parent.pid)


def test_a_family_stops_and_goes_on_together(place: Workplace) -> None:
    """A stop reaches what a process started, and so does the signal to go on."""
    members = family(place)

    send_signal(members, signal.SIGSTOP)
    wait_for(lambda: {member.status() for member in members} == {psutil.STATUS_STOPPED}, "all to stand still")
    send_signal(members, signal.SIGCONT)

    wait_for(lambda: psutil.STATUS_STOPPED not in {member.status() for member in members}, "all to go on")


def test_nothing_is_left_behind() -> None:
    """At the end of a place its processes are gone, stopped ones and children included, and so are its files."""
    with Workplace() as place:
        members = family(place)
        send_signal(members, signal.SIGSTOP)

    assert not place.path.exists()
    wait_for(lambda: not any(m.is_running() and m.status() != psutil.STATUS_ZOMBIE for m in members), "their end")


def test_process_that_fails_says_why(place: Workplace) -> None:
    """Who waits for a process that ends with an error gets its last words at once."""
    started_s = time.monotonic()
    process = place.popen(("-c", "raise SystemExit('no such port')"))

    with pytest.raises(BenchmarkError, match=r"waited for an answer, but: no such port"):
        place.wait(lambda: False, process, "an answer")

    assert time.monotonic() - started_s < 10.0
