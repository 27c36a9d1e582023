"""Fields and units as the check sees them, through the real nvidia-ml-py on the fake driver library."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from nvml_machine import PROFILES, Machine, MovingCounter, load_fake_driver

from bench.gpu_check import gpu_readings
from bench.gpu_check.calibration import Calibration
from bench.gpu_check.gpu_readings import GpuReadings, check_fields
from bench.gpu_check.outcome import Check, Outcome, attempt

SECONDS = 2.5
MakeMachine = Callable[..., Machine]


@pytest.fixture
def make_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeMachine:
    """Makes the machine that the driver is on."""
    load_fake_driver()
    monkeypatch.setenv("FAKE_NVML_STATE", str(tmp_path / "nvml"))
    monkeypatch.setattr(gpu_readings, "FIELDS_S", SECONDS)
    return lambda *arguments: Machine(tmp_path / "nvml", *arguments)


def calibrated(*checks: Callable[[Calibration], Check]) -> list[Outcome]:
    """Some checks of one window, without a load."""
    with GpuReadings() as readings:
        calibration = Calibration(readings, [], [], SECONDS)
        readings.watch(0.5)
        calibration._window = calibration._observe()
        return [attempt("check", check(calibration)) for check in checks]


@pytest.mark.parametrize("profile", PROFILES)
def test_every_kind_of_machine_has_what_all_have(profile: str, make_machine: MakeMachine) -> None:
    """From a consumer card to eight H200, also with MIG, nothing that is expected is missing."""
    machine = make_machine(None, profile)
    with GpuReadings() as readings:
        outcome = attempt("fields", lambda figures: check_fields(readings, figures))

    assert outcome.outcome == "passed", outcome
    assert outcome.figures["gpus"] == [f"GPU-{index}" for index in range(machine.num_gpus)]
    assert outcome.figures["errors"] == []


@pytest.mark.parametrize(("rate_per_s", "unit"), [(1e9, "ns"), (1e6, "us"), (1e3, "ms")])
def test_the_unit_of_the_driver_is_told(rate_per_s: float, unit: str, make_machine: MakeMachine) -> None:
    """Whatever unit the driver counts throttled time in, the sidecar's seconds tell which; its own are seconds."""
    make_machine(1).set(gpu0__violation__0=MovingCounter(10**12, rate_per_s, time.time()))
    units, seconds = calibrated(
        lambda calibration: calibration.check_driver_units, lambda calibration: calibration.check_throttled_seconds
    )

    assert units.figures["driver_unit software_power_cap GPU-0"] == unit
    assert (units.outcome, seconds.outcome) == ("passed", "passed"), (units, seconds)


def test_energy_that_is_not_the_integral_of_power_is_found(make_machine: MakeMachine) -> None:
    """1. 300 W, counted as such: passes. 2. The same with a counter in joules: fails, a thousand times too small."""
    machine = make_machine(1)
    machine.set_power(0, 300_000)
    (good,) = calibrated(lambda calibration: calibration.check_energy)
    machine.set(gpu0__energy_mj=MovingCounter(0, 300.0, time.time()))
    (bad,) = calibrated(lambda calibration: calibration.check_energy)

    assert good.outcome == "passed", good
    assert bad.outcome == "failed"
    assert bad.figures["energy_ratio GPU-0"] == pytest.approx(0.001, rel=0.2)


def test_without_throttling_no_unit_is_claimed(make_machine: MakeMachine) -> None:
    """A GPU that runs at its full clock leaves the unit open, and so does one without an energy counter."""
    make_machine(1).set(gpu0__clock_event_reasons=0, gpu0__energy_mj=None)
    found = calibrated(
        lambda calibration: calibration.check_driver_units,
        lambda calibration: calibration.check_throttled_seconds,
        lambda calibration: calibration.check_energy,
    )

    assert [outcome.outcome for outcome in found] == ["skipped"] * 3, found
