"""Host and process readings, and a runner that no collector can hold up."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sidecar.collectors.catalogue import HOST_FAMILIES, PROCESS_FAMILIES
from sidecar.collectors.host import HostCollector
from sidecar.collectors.process import ProcessCollector
from sidecar.collectors.reading import families_of
from sidecar.collectors.runner import CollectorRunner
from sidecar.samples import ExportedFamily, Labels, labels_of

Values = dict[tuple[str, Labels], float]


def values_of(families: Sequence[ExportedFamily]) -> Values:
    """Points by name and labels."""
    return {(name, labels): value for family in families for name, labels, value in family.points}


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_host_shows_every_declared_family(tmp_path: Path) -> None:
    """On Linux every host family has a value, and the watched disk is the file system of its directory."""
    families = HostCollector({"state": tmp_path}).collect()

    assert {f.name for f in families} >= {f.name for f in HOST_FAMILIES if "network" not in f.name}
    total = values_of(families)["dflash_host_disk_total_bytes", labels_of(directory="state")]
    info = os.statvfs(tmp_path)
    assert total == info.f_blocks * info.f_frsize


def test_host_leaves_out_a_directory_that_is_gone(tmp_path: Path) -> None:
    """A missing directory has no disk series and does not fail the reading."""
    names = {f.name for f in HostCollector({"state": tmp_path / "gone"}).collect()}

    assert "dflash_host_disk_total_bytes" not in names
    assert "dflash_host_memory_total_bytes" in names


def test_process_reads_a_live_process_and_forgets_a_dead_one() -> None:
    """Every family of a live process has a value with its labels; when it ends its series go, without a failure."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        collector = ProcessCollector(lambda: {child.pid: labels_of(run="b")})
        values = values_of(collector.collect())
        child.communicate(b"\n")
        child.wait()
    gone = collector.collect()

    assert {name for name, _ in values} == {f.name for f in PROCESS_FAMILIES}
    assert all(("run", "b") in labels for _, labels in values)
    assert values["dflash_process_threads", labels_of(run="b")] == 1.0
    assert gone == ()


def test_thread_time_is_summed_by_name_and_outlives_its_thread() -> None:
    """Two threads of one name share a series, and it does not go backwards when one of them ends."""
    stop, stop_both = threading.Event(), threading.Event()

    def burn(until: threading.Event) -> None:
        Path("/proc/thread-self/comm").write_text("burner")
        while not until.is_set():
            pass

    threads = [threading.Thread(target=burn, args=(event,)) for event in (stop, stop_both)]
    for thread in threads:
        thread.start()
    collector = ProcessCollector(lambda: {os.getpid(): ()})
    key = ("dflash_process_thread_cpu_seconds_total", labels_of(thread="burner"))
    try:
        wait_until(lambda: values_of(collector.collect()).get(key, 0.0) > 0.2)
        before = values_of(collector.collect())[key]
        stop.set()
        threads[0].join()
        after = values_of(collector.collect())[key]
    finally:
        stop.set()
        stop_both.set()
        for thread in threads:
            thread.join()
    assert after >= before


def test_raising_collector_is_counted_and_harms_no_other(tmp_path: Path) -> None:
    """A collector that raises has success 0, no families and its error; the other one's families are all there."""

    class Broken:
        name = "broken"

        def collect(self) -> Sequence[ExportedFamily]:
            raise OSError("sensor on fire")

    runner = CollectorRunner([Broken(), HostCollector({"state": tmp_path})], interval_s=0.01, deadline_s=5.0)
    runner.start()
    wait_until(lambda: len(runner.latest()) == 2)
    readings = runner.latest()
    runner.close()
    values = values_of(families_of(readings))

    assert readings[0].error == "OSError: sensor on fire"
    assert values["dflash_collector_success", labels_of(collector="broken")] == 0.0
    assert values["dflash_collector_success", labels_of(collector="host")] == 1.0
    assert values["dflash_host_cpus", ()] >= 1.0
