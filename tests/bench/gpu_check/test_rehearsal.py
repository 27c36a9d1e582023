"""The whole check on a machine without a GPU: with the fake driver library, CPU devices, and everything else real."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from nvml_machine import Machine, MovingCounter, build_fake_driver, driver_environment
from training_run import SETTINGS

ROOT = Path(__file__).parents[3]
NO_GPU = {"synchronisations", "allocator", "owners", "gpu_tests"}
"""What needs CUDA itself."""


class Rehearsal:
    """A machine with scripted GPUs and a quick target to train on."""

    def __init__(self, directory: Path, target: Path, profile: str = "h200") -> None:
        build_fake_driver(directory)
        self.machine = Machine(directory / "nvml", 2, profile)
        self._environ = os.environ | driver_environment(directory, directory / "nvml")
        self._output = directory / "figures.json"
        settings = SETTINGS | {"target.path": target, "data.path": target / "train.jsonl"}
        self._train = [f"--train=--set={key}={value}" for key, value in settings.items()]

    def run(self, *options: str, status: int = 0) -> dict[str, dict[str, Any]]:
        """Go through all checks; returns them by name."""
        defaults = ("--rehearse", "--output", str(self._output), "--load-s", "3", "--run-s", "1", *self._train)
        command = [sys.executable, "-m", "bench.gpu_check", *defaults, *options]
        done = subprocess.run(
            command, cwd=ROOT, env=self._environ, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == status, done.stdout + done.stderr
        document = json.loads(self._output.read_text())
        assert done.stdout.endswith(self._output.read_text())
        assert document["passed"] is (status == 0)
        return {check["name"]: check for check in document["checks"]}


def outcomes(checks: dict[str, dict[str, Any]]) -> dict[str, str]:
    """What became of each check."""
    return {name: check["outcome"] for name, check in checks.items()}


@pytest.mark.slow
def test_everything_passes_or_needs_a_gpu(tmp_path: Path, small_target: Path) -> None:
    """1. Two GPUs draw steady power, one under its power cap. 2. All checks. Result: their units are told."""
    rehearsal = Rehearsal(tmp_path, small_target)
    for gpu in (0, 1):
        rehearsal.machine.set_power(gpu, 300_000 + gpu)
    capped = MovingCounter(5_000_000_000, 1e9, time.time())
    rehearsal.machine.set(gpu0__violation__0=capped, gpu1__violation__0=7, gpu1__clock_event_reasons=0)

    checks = rehearsal.run("--tests", "tests/trainer/test_step_path.py -m gpu")

    assert outcomes(checks) == dict.fromkeys(checks, "passed") | dict.fromkeys(NO_GPU, "skipped"), checks
    assert checks["nvml_fields"]["figures"]["gpus"] == ["GPU-0", "GPU-1"]
    assert checks["energy_units"]["figures"]["energy_ratio GPU-0"] == pytest.approx(1.0, abs=0.1)
    assert checks["throttled_seconds"]["figures"]["software_power_cap GPU-0"] == pytest.approx(1.0, abs=0.1)
    assert checks["driver_units"]["figures"]["driver_unit software_power_cap GPU-0"] == "ns"
    assert checks["driver_units"]["figures"]["reference_unit software_power_cap GPU-0"] == "us"
    assert checks["training"]["figures"]["steps"] >= 30
    assert checks["training"]["figures"]["records_lost"] == 0


@pytest.mark.slow
def test_one_that_fails_hides_no_other(tmp_path: Path, small_target: Path) -> None:
    """Power in a wrong unit, a temperature not read, a run with a bad setting, no tests: the rest goes on."""
    rehearsal = Rehearsal(tmp_path, small_target)
    rehearsal.machine.set_power(0, 300_000)
    rehearsal.machine.set(gpu0__power_mw="300", gpu1__temperature_c="!999")

    checks = rehearsal.run("--train=--set=train.optimizer=sgd", "--tests", "tests/gpu_check/no_such_file", status=1)

    assert {name for name, check in checks.items() if check["outcome"] == "failed"} == {
        "nvml_fields",
        "energy_units",
        "driver_units",  # a driver that counts nothing under its power cap
        "training",
        "synchronisations",
        "allocator",
        "owners",
        "gpu_tests",
    }
    assert checks["nvml_fields"]["detail"] == "not read: dflash_gpu_temperature_celsius of GPU-1"
    assert "should be 0.8 to 1.25" in checks["energy_units"]["detail"]
    assert "train.optimizer" in checks["training"]["detail"]
    assert "see the check before" in checks["owners"]["detail"]


def test_without_a_gpu_it_says_what_is_missing(tmp_path: Path) -> None:
    """One line and exit status 2; nothing is written."""
    output = tmp_path / "figures.json"
    command = [sys.executable, "-m", "bench.gpu_check", "--output", str(output)]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 2
    assert done.stderr.startswith("gpu-check: ")
    assert done.stderr.count("\n") == 1
    assert (done.stdout, output.exists()) == ("", False)
