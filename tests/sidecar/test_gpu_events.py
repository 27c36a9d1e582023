"""The events API of the driver when it misbehaves: it costs no GPU its values, and the log no more than a few lines."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nvml_machine import Machine, load_fake_driver

from sidecar.collectors.nvml import GpuFleet
from sidecar.collectors.nvml_events import NAME, WAIT_MS
from sidecar.collectors.reading import families_of
from sidecar.samples import labels_of

INTERVAL_S = 0.05


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Two H200; whatever hangs is let go in the end."""
    load_fake_driver()
    monkeypatch.setenv("FAKE_NVML_STATE", str(tmp_path / "nvml"))
    machine = Machine(tmp_path / "nvml", 2)
    yield machine
    for key in [key for key in machine.values if "delay_ms" in key]:
        del machine.values[key]
    machine.write()


@pytest.fixture
def fleet(machine: Machine) -> Iterator[GpuFleet]:
    """Reads them; a test starts it."""
    assert machine.num_gpus
    fleet = GpuFleet(INTERVAL_S, deadline_s=0.5, probe_s=0.3)
    yield fleet
    machine.set(delay_ms__nvmlEventSetCreate=None, delay_ms__nvmlEventSetWait_v2=None)
    fleet.close(5.0)


def shown(fleet: GpuFleet, name: str, **labels: str) -> float | None:
    """One value of the page."""
    points = [point for family in families_of(fleet.latest()) for point in family.points]
    return next((value for found, of, value in points if (found, of) == (name, labels_of(**labels))), None)


def wait_for_value(fleet: GpuFleet, expected: float, name: str, **labels: str) -> None:
    """Poll the page; each look at it must come back at once."""
    deadline_s = time.monotonic() + 12.0
    while True:
        started_s = time.monotonic()
        value = shown(fleet, name, **labels)
        assert time.monotonic() - started_s < 0.2
        if value == expected:
            return
        assert started_s < deadline_s, f"{name} {labels}: {value}, not {expected}"
        time.sleep(0.01)


@pytest.mark.parametrize("call", ["nvmlEventSetCreate", "nvmlEventSetWait_v2"])
def test_events_that_hang_cost_no_gpu_and_no_page(
    machine: Machine, fleet: GpuFleet, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Making a set of events, or waiting for one, never returns: all GPUs are read, and the events are a failure."""
    monkeypatch.setattr("sidecar.collectors.nvml_events.LATE_S", 1.5)
    machine.set_call(call, delay="hang")
    fleet.start()
    for uuid in ("GPU-0", "GPU-1"):
        wait_for_value(fleet, 1.0, "dflash_gpu_up", uuid=uuid)
    wait_for_value(fleet, 0.0, "dflash_collector_success", collector=NAME)
    machine.set_call(call)
    wait_for_value(fleet, 1.0, "dflash_collector_success", collector=NAME)


def test_lines_about_events_do_not_repeat(machine: Machine, fleet: GpuFleet, caplog: pytest.LogCaptureFixture) -> None:
    """A storm of one XID is one line, and a GPU without events is one, however often the driver is initialised."""
    caplog.set_level(logging.INFO)
    machine.set(gpu1__error__nvmlDeviceRegisterEvents=3)
    fleet.start()
    wait_for_value(fleet, 1.0, "dflash_gpu_up", uuid="GPU-0")
    time.sleep(2 * WAIT_MS / 1000)  # both are listened to
    for _ in range(20):
        machine.raise_xid(0, 31)
    wait_for_value(fleet, 20.0, "dflash_gpu_xid_errors_total", uuid="GPU-0", code="31")
    for _ in range(2):
        machine.set(gpu1__gone=15)
        wait_for_value(fleet, 0.0, "dflash_gpu_up", uuid="GPU-1")
        machine.set(gpu1__gone=None)
        wait_for_value(fleet, 1.0, "dflash_gpu_up", uuid="GPU-1")

    assert [line for line in caplog.messages if "XID 31" in line] == ["GPU GPU-0: XID 31"]
    assert len([line for line in caplog.messages if "tells of no XID" in line]) == 1
