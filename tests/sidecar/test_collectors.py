"""Host, process and GPU readings, and a runner that no collector can hold up."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pynvml
import pytest
from nvml_machine import Machine, load_fake_driver
from watched_process import session_of

from sidecar.collectors.catalogue import GPU_FAMILIES, HOST_FAMILIES
from sidecar.collectors.disk import OUT_DIR_KEY, DiskCollector
from sidecar.collectors.host import HostCollector
from sidecar.collectors.nvml import QUERIES, NvmlCollector
from sidecar.collectors.reading import Reading, families_of
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


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        """Monotonic seconds."""
        return self.now_s


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Two GPUs behind the real nvidia-ml-py."""
    load_fake_driver()
    monkeypatch.setenv("FAKE_NVML_STATE", str(tmp_path / "nvml"))
    yield Machine(tmp_path / "nvml", 2)
    with contextlib.suppress(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlShutdown()


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


def test_two_gpus_in_base_units(machine: Machine) -> None:
    """Every GPU family has one point per GPU, in base units, keyed by UUID."""
    machine.set(gpu1__power_mw="100500")
    values = values_of(NvmlCollector().collect())

    gpu0, gpu1 = labels_of(uuid="GPU-0"), labels_of(uuid="GPU-1")
    info = labels_of(uuid="GPU-0", index="0", name="NVIDIA H200", driver="580.65.06")
    assert {name for name, _ in values} == {f.name for f in GPU_FAMILIES}
    assert len(values) == 2 * len(GPU_FAMILIES)
    assert {name: value for (name, labels), value in values.items() if labels in (gpu0, info)} == {
        "dflash_gpu_up": 1.0,
        "dflash_gpu_info": 1.0,
        "dflash_gpu_utilization_ratio": 0.97,
        "dflash_gpu_memory_utilization_ratio": 0.41,
        "dflash_gpu_memory_used_bytes": 120e9,
        "dflash_gpu_memory_reserved_bytes": 600e6,
        "dflash_gpu_memory_total_bytes": 150754820096.0,
        "dflash_gpu_power_watts": 651.25,
        "dflash_gpu_power_limit_watts": 700.0,
        "dflash_gpu_energy_joules_total": 123456.789,
        "dflash_gpu_temperature_celsius": 61.0,
        "dflash_gpu_sm_clock_hertz": 1980e6,
        "dflash_gpu_memory_clock_hertz": 3201e6,
    }
    assert values["dflash_gpu_power_watts", gpu1] == 100.5


def test_every_query_belongs_to_declared_families() -> None:
    """The table of queries and the catalogue name the same families."""
    queried = [family for query in QUERIES for family in query.families]

    assert sorted([*queried, "dflash_gpu_up", "dflash_gpu_info"]) == sorted(f.name for f in GPU_FAMILIES)


def test_unsupported_field_is_left_out_and_asked_again_later(machine: Machine) -> None:
    """NOT_SUPPORTED removes one field of one GPU, is not asked again at once, and comes back after the retry time."""
    clock = Clock()
    collector = NvmlCollector(unsupported_retry_s=600.0, clock=clock)
    key0, key1 = (("dflash_gpu_power_watts", labels_of(uuid=f"GPU-{i}")) for i in (0, 1))
    machine.set(gpu0__power_mw=None)
    first = values_of(collector.collect())
    machine.set(gpu0__power_mw="500000")
    clock.now_s += 599.0
    too_early = values_of(collector.collect())
    clock.now_s += 1.0
    later = values_of(collector.collect())

    assert (key0 in first, key1 in first) == (False, True)
    assert len(first) == 2 * len(GPU_FAMILIES) - 1
    assert key0 not in too_early
    assert later[key0] == 500.0


def test_one_failing_call_costs_only_its_own_values(machine: Machine) -> None:
    """An unknown error leaves out that field this time and is asked again at the next reading."""
    collector = NvmlCollector()
    key = ("dflash_gpu_temperature_celsius", labels_of(uuid="GPU-1"))
    machine.set(gpu1__temperature_c="!999")
    failed = values_of(collector.collect())
    machine.set(gpu1__temperature_c="55")
    back = values_of(collector.collect())

    assert key not in failed
    assert len(failed) == 2 * len(GPU_FAMILIES) - 1
    assert back[key] == 55.0


def test_lost_gpu_drops_its_series_and_comes_back(machine: Machine) -> None:
    """GPU_IS_LOST leaves dflash_gpu_up 0 and nothing else of that GPU; after the probe time it is found again."""
    clock = Clock()
    collector = NvmlCollector(reprobe_s=30.0, clock=clock)
    lost_up = ("dflash_gpu_up", labels_of(uuid="GPU-0"))
    collector.collect()
    machine.set(gpu0__gone="15")
    lost = values_of(collector.collect())
    clock.now_s += 31.0
    still_lost = values_of(collector.collect())
    machine.set(gpu0__gone=None)
    clock.now_s += 31.0
    found = values_of(collector.collect())

    assert [(name, value) for (name, labels), value in lost.items() if ("uuid", "GPU-0") in labels] == [
        ("dflash_gpu_up", 0.0)
    ]
    assert len(lost) == len(GPU_FAMILIES) + 1
    assert still_lost == lost
    assert found[lost_up] == 1.0
    assert len(found) == 2 * len(GPU_FAMILIES)


def test_driver_that_is_missing_is_quiet_and_found_when_installed(machine: Machine) -> None:
    """Without a driver there are no series and no failure; once it is there it is found within the probe time."""
    clock = Clock()
    collector = NvmlCollector(reprobe_s=30.0, clock=clock)
    machine.remove_driver()
    absent = collector.collect()
    machine.write()
    too_early = collector.collect()
    clock.now_s += 30.0
    present = collector.collect()

    assert (absent, too_early) == ((), ())
    assert len(values_of(present)) == 2 * len(GPU_FAMILIES)


def test_unloaded_driver_leaves_its_gpus_down(machine: Machine) -> None:
    """When the driver goes, the GPUs seen before are shown as down, with no other series."""
    clock = Clock()
    collector = NvmlCollector(clock=clock)
    collector.collect()
    machine.set(gpu0__gone="9", gpu1__gone="9")
    collector.collect()
    machine.remove_driver()
    clock.now_s += 60.0

    assert sorted(values_of(collector.collect()).items()) == [
        (("dflash_gpu_up", labels_of(uuid="GPU-0")), 0.0),
        (("dflash_gpu_up", labels_of(uuid="GPU-1")), 0.0),
    ]


def test_driver_that_does_not_match_its_library_is_a_failure(machine: Machine) -> None:
    """A version mismatch raises at every reading, so that it shows as a failing collector, until it is mended."""
    collector = NvmlCollector()
    machine.set(init="18")
    for _ in range(2):
        with pytest.raises(pynvml.NVMLError_LibRmVersionMismatch):
            collector.collect()
    machine.set(init=None)

    assert len(values_of(collector.collect())) == 2 * len(GPU_FAMILIES)


def test_without_any_driver_library_nothing_is_read() -> None:
    """A machine without the library gives no series and no error."""
    code = """
import ctypes
try:
    ctypes.CDLL("libnvidia-ml.so.1")
except OSError:
    from sidecar.collectors.nvml import NvmlCollector
    print(NvmlCollector().collect())
else:
    print("has a driver")
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    if done.stdout == "has a driver\n":
        pytest.skip("this machine has the driver library")

    assert (done.stdout, done.stderr) == ("()\n", "")


def test_hung_driver_call_is_reported_and_holds_up_nobody(machine: Machine) -> None:
    """A call that does not return shows as a failed nvml collector; host goes on, close does not wait, it recovers."""
    machine.set(gpu0__delay_ms="400")
    runner = CollectorRunner([NvmlCollector(), HostCollector()], interval_s=0.02, deadline_s=0.1)
    runner.start()

    def reading(name: str) -> Reading | None:
        return next((r for r in runner.latest() if r.collector == name), None)

    wait_until(lambda: reading("nvml") is not None)
    hung, host = reading("nvml"), reading("host")
    machine.set(gpu0__delay_ms=None)
    wait_until(lambda: (r := reading("nvml")) is not None and r.success, timeout_s=10.0)
    machine.set(gpu0__delay_ms="1500")
    wait_until(lambda: (r := reading("nvml")) is not None and not r.success)
    started_s = time.monotonic()
    runner.close(timeout_s=0.1)
    close_s = time.monotonic() - started_s

    assert hung is not None
    assert host is not None
    assert (hung.success, hung.families, hung.error) == (False, (), "no answer within 0.1 s")
    assert host.success
    assert close_s < 0.5


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
