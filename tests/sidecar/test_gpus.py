"""GPUs through the real nvidia-ml-py: every field, and every way in which a driver misbehaves."""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nvml_machine import Machine, load_fake_driver

from sidecar.collectors.nvml import GpuFleet
from sidecar.collectors.nvml_catalogue import GPU_FAMILIES
from sidecar.collectors.nvml_events import WAIT_MS
from sidecar.collectors.nvml_gpu import Owners
from sidecar.collectors.reading import Reading, families_of
from sidecar.gpu_owners import bare_uuid
from sidecar.samples import Labels, labels_of

Values = dict[tuple[str, Labels], float]
INTERVAL_S = 0.05
PROBE_S = 0.3


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Watch:
    """A fleet with what it shows."""

    def __init__(self, owners: Owners | None = None, deadline_s: float = 0.5) -> None:
        self.fleet = GpuFleet(INTERVAL_S, deadline_s, PROBE_S, owners)
        self.fleet.start()

    def values(self) -> Values:
        """Points by name and labels."""
        readings = self.fleet.latest()
        return {(name, labels): value for family in families_of(readings) for name, labels, value in family.points}

    def get(self, name: str, uuid: str = "GPU-0", **labels: str) -> float | None:
        """One value of a GPU."""
        return self.values().get((f"dflash_gpu_{name}", labels_of(uuid=uuid, **labels)))

    def of(self, uuid: str) -> set[str]:
        """Names of the series of one GPU."""
        return {name for name, labels in self.values() if ("uuid", uuid) in labels}

    def info(self, uuid: str = "GPU-0") -> dict[str, str]:
        """Labels of a GPU's info."""
        found = [
            dict(labels) for name, labels in self.values() if name == "dflash_gpu_info" and ("uuid", uuid) in labels
        ]
        assert len(found) <= 1
        return found[0] if found else {}

    def readings(self, collector: str) -> list[Reading]:
        """Newest readings of one collector."""
        return [reading for reading in self.fleet.latest() if reading.collector == collector]

    def success(self, collector: str) -> float | None:
        """Whether a collector works as a whole."""
        return self.values().get(("dflash_collector_success", labels_of(collector=collector)))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Two H200."""
    load_fake_driver()
    monkeypatch.setenv("FAKE_NVML_STATE", str(tmp_path / "nvml"))
    return Machine(tmp_path / "nvml", 2)


@pytest.fixture
def watch(machine: Machine) -> Iterator[Watch]:
    """Its fleet, with both GPUs up."""
    watch = Watch()
    wait_until(
        lambda: all(
            watch.get("up", f"GPU-{i}") == 1.0 and watch.get("sm_utilization_ratio", f"GPU-{i}") for i in (0, 1)
        )
    )
    yield watch
    for key in [key for key in machine.values if "delay_ms" in key]:
        del machine.values[key]
    machine.write()
    watch.fleet.close(5.0)


def test_every_family_is_read_in_base_units(watch: Watch, machine: Machine) -> None:
    """An H200 has every declared family but XIDs that did not occur, in base units."""
    wait_until(lambda: watch.get("ecc_errors_total", kind="corrected") is not None)
    names = watch.of("GPU-0")

    assert {family.name for family in GPU_FAMILIES} - names <= {"dflash_gpu_xid_errors_total"}
    assert watch.get("power_watts") == int(machine.values["gpu0.power_mw"]) / 1e3
    assert watch.get("memory_clock_hertz") == int(machine.values["gpu0.memory_clock_mhz"]) * 1e6
    assert watch.info()["driver"] == "580.65.06"
    assert watch.info()["pci_bus_id"] == machine.values["gpu0.pci_bus_id"]
    assert (watch.info()["role"], watch.info()["worker"]) == ("", "")


def test_one_bad_field_costs_only_its_own_values(watch: Watch, machine: Machine) -> None:
    """An unknown error or a missing field takes one family of one GPU; the former is back at the next reading."""
    machine.set(gpu0__power_mw="!999", gpu1__temperature_c=None)
    wait_until(lambda: watch.get("power_watts") is None and watch.get("temperature_celsius", "GPU-1") is None)

    assert watch.get("power_watts", "GPU-1") is not None
    assert watch.get("temperature_celsius") is not None
    machine.set(gpu0__power_mw="500000")
    wait_until(lambda: watch.get("power_watts") == 500.0)


def test_call_that_never_returns_leaves_the_other_gpu_fresh(watch: Watch, machine: Machine) -> None:
    """GPU 1 hangs: it alone is down and shows nothing else, GPU 0 goes on, and it is back when the call returns."""
    machine.set(gpu1__delay_ms="hang")
    wait_until(lambda: watch.get("up", "GPU-1") == 0.0)
    machine.set(gpu0__power_mw="123000")
    wait_until(lambda: watch.get("power_watts") == 123.0)

    assert watch.of("GPU-1") == {"dflash_gpu_up"}
    assert watch.success("nvml") == 0.0
    machine.set(gpu1__delay_ms=None)
    wait_until(lambda: watch.get("up", "GPU-1") == 1.0 and watch.success("nvml") == 1.0)


def test_field_that_fails_on_is_told_once_however_often_the_driver_is_initialised(
    watch: Watch, machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Performance monitoring fails for good while another GPU comes and goes: one line, and one when it is back."""
    monkeypatch.setattr("sidecar.collectors.nvml_gpu.LASTING_S", 2 * INTERVAL_S)
    caplog.set_level(logging.INFO)
    machine.set_call("nvmlGpmSampleGet", gpu=0, error=999)

    def lines(text: str) -> list[str]:
        return [line for line in caplog.messages if "GPU-0: dflash_gpu_sm_utilization" in line and text in line]

    wait_until(lambda: bool(lines("cannot be read")))
    for _ in range(3):
        machine.set(gpu1__gone=15)
        wait_until(lambda: watch.get("up", "GPU-1") == 0.0)
        machine.set(gpu1__gone=None)
        wait_until(lambda: watch.get("up", "GPU-1") == 1.0)
        time.sleep(4 * INTERVAL_S)
    machine.set_call("nvmlGpmSampleGet", gpu=0)
    wait_until(lambda: bool(lines("is read again")))

    assert (len(lines("cannot be read")), len(lines("is read again"))) == (1, 1)


def test_name_that_is_no_text_costs_the_gpu_nothing_else(machine: Machine) -> None:
    """A name in bytes that are not UTF-8 is left empty; the GPU is read."""
    machine.set(gpu0__name="x")
    raw = machine.path.read_bytes().replace(b"gpu0.name=x", b"gpu0.name=\xff\xfe")
    machine.path.write_bytes(raw)
    watch = Watch()
    wait_until(lambda: watch.get("power_watts") is not None)

    assert watch.info()["name"] == ""
    watch.fleet.close(5.0)


def test_close_does_not_wait_for_a_wedged_call(watch: Watch, machine: Machine) -> None:
    """A call that never returns is abandoned after the bound."""
    machine.set(gpu1__delay_ms="hang")
    wait_until(lambda: watch.get("up", "GPU-1") == 0.0)
    started_s = time.monotonic()
    watch.fleet.close(1.0)

    assert 0.9 < time.monotonic() - started_s < 3.0


@pytest.mark.parametrize("error", [15, 16, 28, 999])
def test_lost_gpu_drops_its_series_and_comes_back(watch: Watch, machine: Machine, error: int) -> None:
    """Lost, reset required, not found, unknown error for everything: down with nothing else shown, then found again."""
    machine.set(gpu0__gone=error)
    wait_until(lambda: watch.get("up") == 0.0)

    assert watch.of("GPU-0") == {"dflash_gpu_up"}
    wait_until(lambda: watch.get("up", "GPU-1") == 1.0 and watch.get("power_watts", "GPU-1") is not None)
    machine.set(gpu0__gone=None)
    wait_until(lambda: watch.get("up") == 1.0 and watch.get("power_watts") is not None)


def test_added_gpu_is_found(watch: Watch, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU that the kernel driver shows is read without a restart."""
    monkeypatch.setattr("sidecar.collectors.nvml.GPU_DIRECTORY", tmp_path / "gpus")
    (tmp_path / "gpus" / "new").mkdir(parents=True)
    machine.add_gpu()
    wait_until(lambda: watch.get("up", "GPU-2") == 1.0)

    assert watch.of("GPU-2") >= {"dflash_gpu_up", "dflash_gpu_info", "dflash_gpu_power_watts"}


def test_driver_unloaded_and_reloaded_restarts_its_counters(watch: Watch, machine: Machine) -> None:
    """Without a driver all GPUs known are down and nothing fails; after a reload energy begins anew."""
    machine.remove_driver()
    wait_until(lambda: watch.get("up") == 0.0 and watch.success("nvml") == 1.0)
    assert watch.of("GPU-1") == {"dflash_gpu_up"}
    machine.set(gpu0__energy_mj="5000")
    wait_until(lambda: watch.get("energy_joules_total") == 5.0)


def test_mismatch_is_a_failure_until_it_is_mended(machine: Machine) -> None:
    """A library that does not fit the driver fails the collector all the time, and needs no restart when it fits."""
    machine.set(init="18")
    watch = Watch()
    wait_until(lambda: watch.success("nvml") == 0.0)
    for _ in range(20):
        time.sleep(0.02)
        assert watch.success("nvml") == 0.0
    machine.set(init=None)
    wait_until(lambda: watch.get("up") == 1.0 and watch.success("nvml") == 1.0)
    watch.fleet.close(5.0)


@pytest.mark.parametrize("moment", ["at the start", "later"])
def test_driver_that_cannot_count_its_gpus_fails_until_it_can(
    machine: Machine, caplog: pytest.LogCaptureFixture, moment: str
) -> None:
    """The collector fails all the time, with one line in the log however often it is tried, and one when it works."""
    caplog.set_level(logging.INFO)
    if moment == "at the start":
        machine.set_call("nvmlDeviceGetCount_v2", error=999)
    watch = Watch()
    if moment == "later":
        wait_until(lambda: watch.get("up") == 1.0)
        machine.set_call("nvmlDeviceGetCount_v2", error=999)
    wait_until(lambda: watch.success("nvml") == 0.0)
    deadline_s = time.monotonic() + 5 * PROBE_S
    while time.monotonic() < deadline_s:
        assert watch.success("nvml") == 0.0
        time.sleep(0.01)
    machine.set_call("nvmlDeviceGetCount_v2")
    wait_until(lambda: watch.get("up") == 1.0 and watch.success("nvml") == 1.0)
    watch.fleet.close(5.0)

    lines = [line for line in caplog.messages if line.startswith("collector nvml driver")]
    assert [line for line in lines if "works again" in line] == lines[1:]
    assert len(lines) == 2


def test_xids_are_counted_by_code_and_outlive_their_gpu(watch: Watch, machine: Machine) -> None:
    """Equal codes add up, a series begins at 0, and the count stays when the GPU is lost."""
    seen = set()
    time.sleep(2 * WAIT_MS / 1000)  # both are listened to
    machine.raise_xid(0, 79)
    machine.raise_xid(0, 79)
    machine.raise_xid(1, 31)

    def arrived() -> bool:
        seen.add(watch.get("xid_errors_total", code="79"))
        return (
            watch.get("xid_errors_total", code="79") == 2.0 and watch.get("xid_errors_total", "GPU-1", code="31") == 1.0
        )

    wait_until(arrived)
    machine.set(gpu0__gone=15)
    wait_until(lambda: watch.get("up") == 0.0)

    assert 0.0 in seen
    assert watch.get("xid_errors_total", code="79") == 2.0


def test_throttling_is_flagged_and_its_time_counted(watch: Watch, machine: Machine) -> None:
    """The time under a reason follows the wall clock while its flag is set and stands still otherwise."""
    machine.set(gpu0__clock_event_reasons="64")
    wait_until(lambda: watch.get("throttled", reason="hardware_thermal") == 1.0)
    before, started_s = watch.get("throttled_seconds_total", reason="hardware_thermal"), time.monotonic()
    time.sleep(1.0)
    after, elapsed_s = watch.get("throttled_seconds_total", reason="hardware_thermal"), time.monotonic() - started_s

    assert before is not None
    assert after is not None
    assert after - before == pytest.approx(elapsed_s, abs=0.2)
    assert watch.get("throttled", reason="power_brake") == 0.0
    assert watch.get("throttled_seconds_total", reason="power_brake") == 0.0


def test_workers_and_trainers_are_labelled(machine: Machine) -> None:
    """Role and worker come from the trainers; memory of a trainer's process is told apart from that of others."""
    machine.set(gpu0__processes="11:1000,12:500")
    owners = Owners(lambda: {bare_uuid("GPU-0"): {"role": "drafter", "worker": "1"}}, lambda: {11: labels_of(run="b")})
    watch = Watch(owners)
    wait_until(lambda: watch.get("process_memory_bytes", process="other") is not None)

    assert (watch.info()["role"], watch.info()["worker"]) == ("drafter", "1")
    assert watch.info("GPU-1")["role"] == ""
    assert watch.get("process_memory_bytes", process="other") == 500.0
    assert watch.get("process_memory_bytes", process="trainer", run="b") == 1000.0
    watch.fleet.close(5.0)


def test_mig_instances_have_their_own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With MIG on, each instance shows under its own UUID what it has; the GPU keeps power and temperature."""
    load_fake_driver()
    monkeypatch.setenv("FAKE_NVML_STATE", str(tmp_path / "nvml"))
    Machine(tmp_path / "nvml", profile="a100_mig")
    watch = Watch(Owners(lambda: {"0": {"role": "target", "worker": "0"}}))
    wait_until(lambda: watch.get("memory_used_bytes", "MIG-0") is not None and watch.get("power_watts") is not None)

    assert watch.info("MIG-0")["pci_bus_id"] == watch.info()["pci_bus_id"]
    assert watch.info("MIG-0")["role"] == "target"
    assert "dflash_gpu_utilization_ratio" not in watch.of("GPU-0")
    assert "dflash_gpu_power_watts" not in watch.of("MIG-0")
    watch.fleet.close(5.0)
