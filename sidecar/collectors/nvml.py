"""Reads the GPUs through NVML, each known by its UUID.

`QUERIES` is the table of what is read: to add a signal, declare its family in the catalogue and add a row. One failing
query never removes another, and one failing GPU never removes another:

* Not supported, not permitted, or not in this driver: left out and asked again after `unsupported_retry_s`.
* GPU lost, reset required, driver unloaded: its series go, `dflash_gpu_up` becomes 0, and the library is initialised
  anew after `reprobe_s`, since handles of a lost GPU do not come back to life.
* Anything else: left out this time.

Without a driver library there is nothing to read, which is no failure; it is looked for again after `reprobe_s`.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import pynvml

from sidecar.collectors.catalogue import GPU_FAMILIES
from sidecar.collectors.reading import Value, export
from sidecar.samples import ExportedFamily, labels_of

Handle: TypeAlias = object

_ABSENT = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
_UNSUPPORTED = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
)
_GONE = (
    pynvml.NVML_ERROR_GPU_IS_LOST,
    pynvml.NVML_ERROR_GPU_NOT_FOUND,
    pynvml.NVML_ERROR_RESET_REQUIRED,
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
)


class Query(NamedTuple):
    """One driver call and the families its values belong to, in order."""

    families: tuple[str, ...]
    read: Callable[[Handle], tuple[float, ...]]


def _utilization(handle: Handle) -> tuple[float, ...]:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu / 100, rates.memory / 100


def _memory(handle: Handle) -> tuple[float, ...]:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    return float(memory.used), float(memory.reserved), float(memory.total)


def _temperature(handle: Handle) -> tuple[float, ...]:
    try:
        return (float(pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU)),)
    except pynvml.NVMLError_FunctionNotFound:  # a driver older than the call
        return (float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),)


QUERIES = (
    Query(("dflash_gpu_utilization_ratio", "dflash_gpu_memory_utilization_ratio"), _utilization),
    Query(
        ("dflash_gpu_memory_used_bytes", "dflash_gpu_memory_reserved_bytes", "dflash_gpu_memory_total_bytes"), _memory
    ),
    Query(("dflash_gpu_power_watts",), lambda h: (pynvml.nvmlDeviceGetPowerUsage(h) / 1e3,)),
    Query(("dflash_gpu_power_limit_watts",), lambda h: (pynvml.nvmlDeviceGetEnforcedPowerLimit(h) / 1e3,)),
    Query(("dflash_gpu_energy_joules_total",), lambda h: (pynvml.nvmlDeviceGetTotalEnergyConsumption(h) / 1e3,)),
    Query(("dflash_gpu_temperature_celsius",), _temperature),
    Query(("dflash_gpu_sm_clock_hertz",), lambda h: (pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_SM) * 1e6,)),
    Query(
        ("dflash_gpu_memory_clock_hertz",), lambda h: (pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_MEM) * 1e6,)
    ),
)


class _Gpu:
    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.handle: Handle | None = None
        self.index = 0
        self.name = ""
        self.retry_s: dict[Query, float] = {}


class NvmlCollector:
    """Read all GPUs of this machine.

    Args:
        reprobe_s: time between attempts to find a missing driver or a lost GPU.
        unsupported_retry_s: time until a query that a GPU does not support is tried again.
        clock: monotonic seconds.
    """

    name = "nvml"

    def __init__(
        self,
        reprobe_s: float = 30.0,
        unsupported_retry_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reprobe_s = reprobe_s
        self._unsupported_retry_s = unsupported_retry_s
        self._clock = clock
        self._initialized = False
        self._next_probe_s = float("-inf")
        self._driver = ""
        self._gpus: dict[str, _Gpu] = {}

    def collect(self) -> tuple[ExportedFamily, ...]:
        """Read all GPUs now; raises NVMLError when the driver is there but refuses to be used."""
        now_s = self._clock()
        lost = any(gpu.handle is None for gpu in self._gpus.values())
        if (lost or not self._initialized) and now_s >= self._next_probe_s:
            self._next_probe_s = now_s + self._reprobe_s
            self._connect()
        return export(GPU_FAMILIES, [value for gpu in self._gpus.values() for value in self._values(gpu, now_s)])

    def _connect(self) -> None:
        """Initialise the library anew and find the GPUs; those known before and not found stay known as lost."""
        for gpu in self._gpus.values():
            gpu.handle = None
        if self._initialized:
            self._initialized = False
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            if error.value in _ABSENT:
                return
            self._next_probe_s = float("-inf")  # a failure to report at every reading, until it is over
            raise
        self._initialized = True
        self._driver = pynvml.nvmlSystemGetDriverVersion()
        for index in range(pynvml.nvmlDeviceGetCount()):
            self._find(index)

    def _find(self, index: int) -> None:
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
        except pynvml.NVMLError:
            return  # lost: known as such if it was ever seen
        gpu = self._gpus.setdefault(uuid, _Gpu(uuid))
        gpu.handle, gpu.index, gpu.name = handle, index, name
        gpu.retry_s.clear()

    def _values(self, gpu: _Gpu, now_s: float) -> Iterator[Value]:
        uuid = labels_of(uuid=gpu.uuid)
        readings = self._read(gpu, now_s)
        yield "dflash_gpu_up", uuid, float(gpu.handle is not None)
        if gpu.handle is not None:
            info = labels_of(uuid=gpu.uuid, index=str(gpu.index), name=gpu.name, driver=self._driver)
            yield "dflash_gpu_info", info, 1.0
            yield from ((family, uuid, value) for family, value in readings)

    def _read(self, gpu: _Gpu, now_s: float) -> list[tuple[str, float]]:
        """Values by family; clears the GPU's handle when it turns out to be gone."""
        readings: list[tuple[str, float]] = []
        for query in QUERIES:
            if gpu.handle is None or gpu.retry_s.get(query, now_s) > now_s:
                continue
            try:
                readings += zip(query.families, query.read(gpu.handle), strict=True)
            except pynvml.NVMLError as error:
                if error.value in _GONE:
                    gpu.handle = None
                elif error.value in _UNSUPPORTED:
                    gpu.retry_s[query] = now_s + self._unsupported_retry_s
        return readings
