"""Host and process readings, and a runner that no collector can hold up."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from watched_process import session_of

from sidecar.collectors.catalogue import HOST_FAMILIES
from sidecar.collectors.disk import OUT_DIR_KEY, DiskCollector
from sidecar.collectors.host import HostCollector
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


def test_host_shows_every_declared_family() -> None:
    """On Linux every host family has a value, but those that depend on interfaces and on the kernel's options."""
    families = HostCollector().collect()

    optional = ("network", "pressure")
    assert {f.name for f in families} >= {f.name for f in HOST_FAMILIES if not any(o in f.name for o in optional)}
    pressure = [f for f in families if f.name == "dflash_host_pressure_seconds_total"]
    assert bool(pressure) == Path("/proc/pressure/cpu").exists()


def test_disks_of_state_and_checkpoints_are_watched(tmp_path: Path) -> None:
    """Each has the size of its file system; checkpoints carry their trainer's labels, and a missing one is left out."""
    sessions = [
        session_of(tmp_path / "s", 1, labels_of(run="a"), **{OUT_DIR_KEY: str(tmp_path)}),
        session_of(tmp_path / "s", 2, labels_of(run="b"), **{OUT_DIR_KEY: str(tmp_path / "gone")}),
        session_of(tmp_path / "s", 3),
    ]
    values = values_of(DiskCollector(tmp_path, lambda: sessions).collect())
    info = os.statvfs(tmp_path)

    total = "dflash_host_disk_total_bytes"
    assert {key: value for key, value in values.items() if key[0] == total} == {
        (total, labels_of(directory="state")): info.f_blocks * info.f_frsize,
        (total, labels_of(directory="checkpoints", run="a")): info.f_blocks * info.f_frsize,
    }


def test_readings_of_all_threads_begin_together() -> None:
    """From the second one on they begin at whole multiples of the interval, whenever each collector was started."""
    times_s: dict[str, list[float]] = {"a": [], "b": []}
    runners = [CollectorRunner([Noting(name, times_s[name])], interval_s=0.2, deadline_s=5.0) for name in times_s]
    for runner in runners:
        runner.start()
        time.sleep(0.07)
    wait_until(lambda: all(len(times) >= 4 for times in times_s.values()))
    for runner in runners:
        runner.close()

    for times in times_s.values():
        assert times[1] - times[0] >= 0.099  # a rate over less would say little
        assert all(min(time_s % 0.2, 0.2 - time_s % 0.2) < 0.05 for time_s in times[1:4])


class Noting:
    """A collector that notes when it is asked."""

    def __init__(self, name: str, times_s: list[float]) -> None:
        self.name = name
        self._times_s = times_s

    def collect(self) -> Sequence[ExportedFamily]:
        """Note the time."""
        self._times_s.append(time.monotonic())
        return ()


def test_raising_collector_is_counted_and_harms_no_other() -> None:
    """A collector that raises has success 0, no families and its error; the other one's families are all there."""

    class Broken:
        name = "broken"

        def collect(self) -> Sequence[ExportedFamily]:
            raise OSError("sensor on fire")

    runner = CollectorRunner([Broken(), HostCollector()], interval_s=0.01, deadline_s=5.0)
    runner.start()
    wait_until(lambda: len(runner.latest()) == 2)
    readings = runner.latest()
    runner.close()
    values = values_of(families_of(readings))

    assert readings[0].error == "OSError: sensor on fire"
    assert values["dflash_collector_success", labels_of(collector="broken")] == 0.0
    assert values["dflash_collector_success", labels_of(collector="host")] == 1.0
    assert values["dflash_host_cpus", ()] >= 1.0
