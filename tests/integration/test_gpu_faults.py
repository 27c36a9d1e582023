"""A real sidecar on a GPU machine that misbehaves: it stays alive, says what is wrong and ends cleanly."""

import time
from pathlib import Path

import pytest
from nvml_machine import CallLog, Machine, build_fake_driver, driver_environment
from sidecar_process import Place, Sidecar, wait_for

OPTIONS = (
    *("--set", "collectors.interval_s=0.2", "--set", "collectors.deadline_s=0.5"),
    *("--set", "collectors.gpu_probe_s=0.5", "--set", "interval_s=0.1"),
)


class GpuPlace:
    """A place with a scripted GPU machine; the library is put there by `install`."""

    def __init__(self, place: Place, path: Path) -> None:
        self.place = place
        self.library = path / "driver"
        self.library.mkdir()
        self.log = path / "calls"
        self.machine = Machine(path / "nvml", 4)
        place.environ |= driver_environment(self.library, path / "nvml", self.log)

    def install(self) -> None:
        """Install the driver library."""
        build_fake_driver(self.library)

    def sidecar(self) -> Sidecar:
        """Start a sidecar."""
        return self.place.sidecar(*OPTIONS)


@pytest.fixture
def gpus(place: Place, tmp_path: Path) -> GpuPlace:
    """Four H200 and no library yet."""
    return GpuPlace(place, tmp_path)


def up(sidecar: Sidecar) -> list[float | None]:
    """dflash_gpu_up of the four GPUs."""
    metrics = sidecar.metrics()
    return [metrics.get(f'dflash_gpu_up{{uuid="GPU-{index}"}}') for index in range(4)]


def test_driver_installed_later_is_found(gpus: GpuPlace) -> None:
    """Without a library nothing of GPUs is shown; once installed all are read, without a restart."""
    sidecar = gpus.sidecar()
    assert up(sidecar) == [None] * 4
    gpus.install()
    wait_for(lambda: up(sidecar) == [1.0] * 4, "the GPUs", 15)


def test_sigterm_in_the_middle_of_a_call_waits_for_it(gpus: GpuPlace) -> None:
    """While every call takes 100 ms SIGTERM leaves no call half done and shuts the driver down once."""
    gpus.install()
    sidecar = gpus.sidecar()
    wait_for(lambda: up(sidecar) == [1.0] * 4, "the GPUs", 15)
    gpus.machine.set(**{f"gpu{index}__delay_ms": "100" for index in range(4)})
    time.sleep(0.5)
    sidecar.terminate()
    calls = CallLog(gpus.log)

    assert sidecar.process.returncode == 0
    assert calls.half_done == []
    assert calls.counts()["nvmlShutdown"] == 1


def test_call_that_never_returns_is_abandoned_alone(gpus: GpuPlace) -> None:
    """One wedged GPU is down while pages and the others stay fresh; it is told of once, and SIGTERM still works."""
    gpus.install()
    sidecar = gpus.sidecar()
    wait_for(lambda: up(sidecar) == [1.0] * 4, "the GPUs", 15)
    gpus.machine.set(gpu3__delay_ms="hang")
    wait_for(lambda: up(sidecar) == [1.0, 1.0, 1.0, 0.0], "the wedge to show", 15)
    gpus.machine.set(gpu0__power_mw="111000")
    wait_for(lambda: sidecar.metrics()['dflash_gpu_power_watts{uuid="GPU-0"}'] == 111.0, "a fresh value", 5)
    metrics = sidecar.metrics()
    duration_s, output = sidecar.terminate()

    assert not [name for name in metrics if 'uuid="GPU-3"' in name and not name.startswith("dflash_gpu_up")]
    assert metrics['dflash_collector_success{collector="nvml"}'] == 0.0
    assert metrics['dflash_collector_success{collector="host"}'] == 1.0
    assert duration_s < 12.0
    assert output.count("collector nvml gpu3: no answer") == 1
    assert CallLog(gpus.log).counts()["nvmlShutdown"] == 0


def test_mismatch_is_told_once_and_mended_without_a_restart(gpus: GpuPlace) -> None:
    """A library that does not fit the driver is one line in the log, one when it fits again."""
    gpus.machine.set(init="18")
    gpus.install()
    sidecar = gpus.sidecar()
    wait_for(
        lambda: sidecar.metrics().get('dflash_collector_success{collector="nvml"}') == 0.0, "the mismatch to show", 15
    )
    time.sleep(1.5)
    gpus.machine.set(init=None)
    gpus.install()
    wait_for(lambda: up(sidecar) == [1.0] * 4, "the GPUs", 15)
    _, output = sidecar.terminate()

    assert output.count("version mismatch") == 1
    assert output.count("collector nvml driver works again") == 1
