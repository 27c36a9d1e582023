"""The allocator's figures in the cells: current values, peaks between readings, and counters that end the story."""

from array import array

import pytest
import torch
from cuda_module import CudaModule, Properties, documented_keys

from shared.catalogue import TRAINER_FAMILIES
from shared.cells import Cells
from trainer.allocator_metrics import AllocatorMetrics

GPUS = tuple(Properties("NVIDIA H200", str(index)) for index in range(2))
PREFIX = "dflash_cuda_allocator_"


class Machine:
    """Two GPUs, a clock, and the metrics that are under test."""

    def __init__(self, *indices: int) -> None:
        self.cuda = CudaModule(*GPUS)
        self.now_s = 0.0
        self._cells = Cells(TRAINER_FAMILIES)
        devices = [torch.device("cuda", index) for index in indices]
        self.metrics = AllocatorMetrics(self._cells, devices, self.cuda, 5.0, lambda: self.now_s)

    def values(self) -> dict[tuple[str, str], float]:
        """What a snapshot holds, by name without its common beginning and device."""
        values = array("d", self._cells.snapshot())
        return {
            (family.name.removeprefix(PREFIX), labels["device"]): values[cell]
            for cell, family, labels in self._cells.schema().layout()
        }

    def pull_after(self, seconds: float) -> dict[tuple[str, str], float]:
        """Let time go by, pull as for a snapshot, and return what it holds."""
        self.now_s += seconds
        self.metrics.pull()
        return self.values()


def test_current_values_per_device() -> None:
    """Each GPU has its own series of every family; a device given twice, as for two workers, is read once."""
    machine = Machine(0, 1, 0)
    machine.cuda.allocate(0, 300)
    machine.cuda.allocate(1, 100)
    machine.cuda.allocate(1, -40)
    machine.cuda.statistics[1]["inactive_split_bytes.all.current"] = 7
    values = machine.pull_after(0)

    assert values["allocated_bytes", "cuda:0"] == 300
    assert values["allocated_bytes", "cuda:1"] == values["active_bytes", "cuda:1"] == 60
    assert values["reserved_bytes", "cuda:1"] == 100
    assert values["inactive_split_bytes", "cuda:1"] == 7
    assert values["device_allocs_total", "cuda:1"] == 1
    families = {family.name.removeprefix(PREFIX) for family in TRAINER_FAMILIES if family.name.startswith(PREFIX)}
    assert values.keys() == {(name, device) for name in families for device in ("cuda:0", "cuda:1")}
    assert machine.cuda.num_readings == {0: 1, 1: 1}


def test_a_peak_is_that_of_the_last_interval() -> None:
    """A burst between two readings shows in the next one, and no longer in the one after."""
    machine = Machine(0)
    machine.cuda.allocate(0, 100)
    machine.pull_after(0)
    machine.cuda.allocate(0, 900)
    machine.cuda.allocate(0, -900)
    burst, after = machine.pull_after(5), machine.pull_after(5)

    assert (burst["allocated_bytes", "cuda:0"], burst["allocated_peak_bytes", "cuda:0"]) == (100, 1000)
    assert (after["allocated_bytes", "cuda:0"], after["allocated_peak_bytes", "cuda:0"]) == (100, 100)
    assert after["reserved_peak_bytes", "cuda:0"] == 1000


def test_snapshots_between_readings_do_not_ask_the_allocator() -> None:
    """At one snapshot a second and one reading in five, eleven snapshots take its lock three times."""
    machine = Machine(0)
    for _ in range(11):
        machine.pull_after(1)

    assert machine.cuda.num_readings[0] == 3


def test_out_of_memory_is_counted_before_the_end() -> None:
    """1. A reading. 2. A step runs out of memory at once. 3. The run ends. Result: the last snapshot counts it."""
    machine = Machine(0)
    machine.pull_after(0)
    with pytest.raises(torch.OutOfMemoryError):
        machine.cuda.run_out_of_memory(0)
    before = machine.pull_after(0.1)
    machine.metrics.expire()
    last = machine.pull_after(0.1)

    assert before["ooms_total", "cuda:0"] == 0
    assert last["ooms_total", "cuda:0"] == last["alloc_retries_total", "cuda:0"] == 1


def test_before_the_first_use_of_cuda_everything_is_zero() -> None:
    """There are no statistics until then, and a reset of what is not there would fail."""
    machine = Machine(0)
    machine.cuda.statistics[0].clear()

    assert set(machine.pull_after(0).values()) == {0.0}


def test_a_cpu_has_no_allocator_series() -> None:
    """Without a GPU nothing is declared and nothing asked, so torch without CUDA serves as well."""
    cells = Cells(TRAINER_FAMILIES)
    AllocatorMetrics(cells, [torch.device("cpu")], torch.cuda, 5.0).pull()

    assert cells.schema().series == ()


def test_torch_documents_every_key_that_is_read() -> None:
    """No key is misspelt: each is in the documentation of the torch that is installed."""
    metrics = Machine(0).metrics

    assert {key for _, key, _ in (*metrics._gauges, *metrics._counters)} <= documented_keys()
