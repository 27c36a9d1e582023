"""The trainer's process, read from outside: the right one, what its threads wait for, and what another user may see."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import psutil
import pytest
from watched_process import listening, session_of

from sidecar.collectors.catalogue import PROCESS_FAMILIES
from sidecar.collectors.process import ProcessCollector, ProcessMemoryCollector
from sidecar.collectors.watched import WatchedTrainers
from sidecar.samples import ExportedFamily, Labels, labels_of
from sidecar.stored import StoredSession

Values = dict[tuple[str, Labels], float]
CPU = "dflash_process_thread_cpu_seconds_total"
WAIT = "dflash_process_thread_runqueue_wait_seconds_total"
SWITCHES = "dflash_process_thread_context_switches_total"


def values_of(families: Sequence[ExportedFamily]) -> Values:
    """Points by name and labels, without those of control groups."""
    points = [point for family in families for point in family.points]
    return {(name, labels): value for name, labels, value in points if not name.startswith("dflash_cgroup")}


def collector_of(*sessions: StoredSession) -> ProcessCollector:
    """A collector for these sessions."""
    return ProcessCollector(WatchedTrainers(lambda: sessions))


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_live_process_shows_every_family_and_a_dead_one_nothing(tmp_path: Path) -> None:
    """Every family has a value with the session's labels; when the process ends its series go, without a failure."""
    with listening(tmp_path / "s") as (process, session):
        collector = collector_of(msgspec.structs.replace(session, labels=labels_of(run="b")))
        values = values_of(collector.collect())
        whole = psutil.Process(process.pid).memory_full_info()
        memory = ProcessMemoryCollector(WatchedTrainers(lambda: [session])).collect()
    gone = values_of(collector.collect())

    assert {name for name, _ in values} == {family.name for family in PROCESS_FAMILIES}
    assert all(("run", "b") in labels for _, labels in values)
    assert values["dflash_process_threads", labels_of(run="b")] == 1.0
    assert values_of(memory) == {("dflash_process_unique_memory_bytes", ()): whole.uss}
    assert gone == {}


def test_threads_starved_for_the_gil_and_for_a_cpu_differ(tmp_path: Path) -> None:
    """On one CPU, two spinning threads share the GIL and sleep for it; a rival for the CPU adds time in its queue."""
    one_cpu = ("taskset", "-c", "0")
    rival = [*one_cpu, sys.executable, "-c", "while True: pass"]
    with (
        listening(tmp_path / "s", "spin-a", "spin-b", "rest-c", prefix=one_cpu) as (_, session),
        subprocess.Popen(rival) as hog,
    ):
        try:
            collector = collector_of(session)
            before = values_of(collector.collect())
            time.sleep(1.5)
            after = values_of(collector.collect())
        finally:
            hog.kill()

    def grew(name: str, thread: str, **labels: str) -> float:
        key = (name, labels_of(thread=thread, **labels))
        return after[key] - before[key]

    assert grew(CPU, "spin-a") + grew(CPU, "spin-b") < 1.2  # never both at once
    assert grew(SWITCHES, "spin-a", kind="voluntary") > 20  # it asks for the GIL
    assert grew(WAIT, "spin-a") + grew(WAIT, "spin-b") > 0.2  # the rival holds the CPU
    assert (grew(CPU, "rest-c"), grew(WAIT, "rest-c"), grew(SWITCHES, "rest-c", kind="voluntary")) == (0.0, 0.0, 0.0)


def test_totals_of_a_name_survive_the_end_and_the_renaming_of_threads(  # noqa: PLR0915 - one course of events
    tmp_path: Path,
) -> None:
    """Two threads share a series; it stays when one ends, and work before a new name is not counted twice."""
    ends = [threading.Event(), threading.Event()]
    comm = "/proc/thread-self/comm"

    def burn(number: int) -> None:
        Path(comm).write_text("burner")
        while not ends[number].is_set():
            pass
        if number == 1:
            Path(comm).write_text("renamed")
            release.wait()

    release = threading.Event()
    threads = [threading.Thread(target=burn, args=(number,)) for number in (0, 1)]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        collector = collector_of(session_of(tmp_path / "s", os.getpid()))
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: values_of(collector.collect()).get((CPU, labels_of(thread="burner")), 0.0) > 0.4)
            before = values_of(collector.collect())
            ends[0].set()
            threads[0].join()
            ended = values_of(collector.collect())
            ends[1].set()
            wait_until(lambda: (CPU, labels_of(thread="renamed")) in values_of(collector.collect()))
            renamed = values_of(collector.collect())
        finally:
            for event in (*ends, release):
                event.set()
            for thread in threads:
                thread.join()

    for name in (CPU, WAIT):
        key = (name, labels_of(thread="burner"))
        assert before[key] <= ended[key] <= renamed[key]
    assert renamed[CPU, labels_of(thread="renamed")] < 0.15


def test_trainer_in_another_pid_namespace_is_found_by_its_socket(tmp_path: Path) -> None:
    """Its hello says process 1; what is read is the process here that knows itself as 1, not this machine's init."""
    unshare = ("unshare", "--pid", "--fork", "--kill-child")
    refused = subprocess.run([*unshare, "true"], check=False, capture_output=True, text=True)
    if refused.returncode:
        pytest.skip(f"the kernel refuses a PID namespace: {refused.stderr}")
    with listening(tmp_path / "s", "rest-a", prefix=unshare) as (process, session):
        [child] = psutil.Process(process.pid).children()
        watched = WatchedTrainers(lambda: [session])
        [found] = watched()
        values = values_of(ProcessCollector(watched).collect())

        assert session.hello.pid == 1
        assert found.process.pid == child.pid
        assert (CPU, labels_of(thread="rest-a")) in values


_OUTSIDER = """
import logging, sys
from pathlib import Path
from watched_process import session_of
from sidecar.collectors.process import ProcessCollector
from sidecar.collectors.watched import WatchedTrainers

logging.basicConfig(format="%(message)s")
watched = WatchedTrainers(lambda: [session_of(Path(sys.argv[1]), int(sys.argv[2]))])
for _ in range(2):
    print(sorted({name.split("_")[1] for f in ProcessCollector(watched).collect() for name, _, _ in f.points}))
print(watched.labels_by_pid())
"""


@pytest.mark.parametrize("hidepid", [1, 2])
def test_process_that_proc_hides_takes_nothing_else_with_it(tmp_path: Path, hidepid: int) -> None:
    """Where /proc hides processes of others, or all that is in them, the trainer is left out with one line."""
    mounting = f"mount -t proc -o hidepid={hidepid} proc /proc"
    leaving = "exec setpriv --regid 65534 --clear-groups --bounding-set=-sys_ptrace"
    outsider = [*("unshare", "--mount", "sh", "-c"), f'{mounting} && {leaving} "$@"', "sh"]
    refused = subprocess.run([*outsider, "true"], check=False, capture_output=True, text=True)
    if refused.returncode:
        pytest.skip(f"the kernel refuses a /proc of our own: {refused.stderr}")
    paths = os.pathsep.join(sys.path)
    with listening(tmp_path / "s", "user-65534") as (process, _):
        done = subprocess.run(
            [*outsider, sys.executable, "-c", _OUTSIDER, str(tmp_path / "s"), str(process.pid)],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
        )

    assert "process" not in done.stdout, done.stdout
    assert done.stdout.splitlines()[-1:] == ["{}"], done.stderr
    assert done.stderr.count("is hidden") == len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("stranger", ["another number", "a younger process"])
def test_stranger_on_the_socket_is_never_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stranger: str
) -> None:
    """A listener with another own number, or one younger than the session, is left out, with one line in the log."""
    with listening(tmp_path / "s") as (process, session):
        said = session.hello
        if stranger == "another number":
            said = msgspec.structs.replace(said, pid=process.pid + 1)
        else:
            said = msgspec.structs.replace(said, start_time_s=said.start_time_s - 3600.0)
        collector = collector_of(msgspec.structs.replace(session, hello=said))
        readings = [values_of(collector.collect()) for _ in range(3)]

    assert readings == [{}, {}, {}]
    assert len(caplog.records) == 1
    assert "is left out" in caplog.text


def test_stopped_trainer_holds_nobody_up(tmp_path: Path) -> None:
    """A trainer under SIGSTOP is read on as before, and at once."""
    with listening(tmp_path / "s", "rest-a") as (process, session):
        process.send_signal(signal.SIGSTOP)
        try:
            started_s = time.monotonic()
            values = values_of(collector_of(session).collect())
            elapsed_s = time.monotonic() - started_s
        finally:
            process.send_signal(signal.SIGCONT)

    assert (CPU, labels_of(thread="rest-a")) in values
    assert elapsed_s < 5.0  # a stop lasts until somebody ends it


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_trainer_of_another_user_lacks_what_is_private_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What nobody may not read of root's trainer is left out; one line at the start, one at the end."""
    caplog.set_level(logging.INFO)
    with listening(tmp_path / "s", "rest-a") as (_, session):
        sessions = [session]
        watched = WatchedTrainers(lambda: sessions)
        collector, memory = ProcessCollector(watched), ProcessMemoryCollector(watched)
        watched()  # found before: the directories of a test are closed to others
        os.seteuid(65534)
        try:
            readings = [values_of(collector.collect()) for _ in range(3)]
            unique = memory.collect()
            sessions.clear()
            collector.collect()
        finally:
            os.seteuid(0)

    private = {"dflash_process_open_fds", "dflash_process_disk_read_bytes_total"}
    private.add("dflash_process_disk_written_bytes_total")
    for values in readings:
        assert {name for name, _ in values} == {family.name for family in PROCESS_FAMILIES} - private
    assert unique == ()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "belongs to root: its open files" in caplog.text
