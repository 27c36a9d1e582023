"""The tables of what is read from a GPU: to add a signal, declare its family in the catalogue and add a row.

`FAST_QUERIES` cost microseconds each. `SLOW_QUERIES` cost milliseconds or change rarely: PCIe throughput blocks for
20 ms a direction, lists of processes hold the driver's lock. Field ids that differ between drivers are not used.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import pynvml

from sidecar.collectors.nvml_device import Device
from sidecar.collectors.nvml_errors import GONE
from sidecar.samples import Point

ALL_LINKS = 0xFFFFFFFF
_VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Member of a field's value by its type."""


class Query(NamedTuple):
    """One question to the driver and the families its values belong to; an error removes these values alone."""

    families: tuple[str, ...]
    read: Callable[[Device], Iterable[Point]]


class Field(NamedTuple):
    """One field value: `scale` turns it into base units."""

    family: str
    field: int
    scope: int = 0
    scale: float = 1.0


_FAST_FIELDS = (
    Field("dflash_gpu_memory_temperature_celsius", pynvml.NVML_FI_DEV_MEMORY_TEMP),
    Field("dflash_gpu_nvlink_transmit_bytes_total", pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL_LINKS, 1024.0),
    Field("dflash_gpu_nvlink_receive_bytes_total", pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS, 1024.0),
    Field("dflash_gpu_pcie_transmit_bytes_total", pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES),
    Field("dflash_gpu_pcie_receive_bytes_total", pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES),
)
_NVLINK_ERRORS = (
    ("replay", pynvml.NVML_NVLINK_ERROR_DL_REPLAY),
    ("recovery", pynvml.NVML_NVLINK_ERROR_DL_RECOVERY),
    ("crc_flit", pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT),
    ("crc_data", pynvml.NVML_NVLINK_ERROR_DL_CRC_DATA),
)
_ECC_KINDS = (
    ("corrected", pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
    ("uncorrected", pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
)


def _one(family: str, read: Callable[[object], float], scale: float = 1.0) -> Query:
    return Query((family,), lambda device: ((family, device.labels, read(device.handle) * scale),))


def _fields(fields: tuple[Field, ...]) -> Query:
    """Many field values in one call, each with a return code of its own."""
    ids = [(field.field, field.scope) for field in fields]

    def read(device: Device) -> Iterator[Point]:
        answers = pynvml.nvmlDeviceGetFieldValues(device.handle, ids)
        for field, answer in zip(fields, answers, strict=True):
            if answer.nvmlReturn in GONE:
                raise pynvml.NVMLError(answer.nvmlReturn)
            if answer.nvmlReturn == pynvml.NVML_SUCCESS and answer.valueType < len(_VALUE_MEMBERS):
                value = getattr(answer.value, _VALUE_MEMBERS[answer.valueType])
                yield field.family, device.labels, value * field.scale

    return Query(tuple(dict.fromkeys(field.family for field in fields)), read)


def _utilization(device: Device) -> Iterator[Point]:
    rates = pynvml.nvmlDeviceGetUtilizationRates(device.handle)
    yield "dflash_gpu_utilization_ratio", device.labels, rates.gpu / 100
    yield "dflash_gpu_memory_utilization_ratio", device.labels, rates.memory / 100


def _memory(device: Device) -> Iterator[Point]:
    memory = pynvml.nvmlDeviceGetMemoryInfo(device.handle, version=pynvml.nvmlMemory_v2)
    yield "dflash_gpu_memory_used_bytes", device.labels, float(memory.used)
    yield "dflash_gpu_memory_reserved_bytes", device.labels, float(memory.reserved)
    yield "dflash_gpu_memory_total_bytes", device.labels, float(memory.total)


def _temperature(handle: object) -> float:
    try:
        return float(pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU))
    except pynvml.NVMLError_FunctionNotFound:  # a driver older than the call
        return float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))


def _ecc(family: str, counter: int) -> Query:
    def read(device: Device) -> Iterator[Point]:
        for kind, error_type in _ECC_KINDS:
            count = pynvml.nvmlDeviceGetTotalEccErrors(device.handle, error_type, counter)
            yield family, device.labels_with("kind", kind), float(count)

    return Query((family,), read)


def _remapped_rows(device: Device) -> Iterator[Point]:
    corrected, uncorrected, pending, failure = pynvml.nvmlDeviceGetRemappedRows(device.handle)
    yield "dflash_gpu_remapped_rows_total", device.labels_with("kind", "corrected"), float(corrected)
    yield "dflash_gpu_remapped_rows_total", device.labels_with("kind", "uncorrected"), float(uncorrected)
    yield "dflash_gpu_remapping_pending", device.labels, float(pending)
    yield "dflash_gpu_remapping_failed", device.labels, float(failure)


def _nvlink_errors(device: Device) -> Iterator[Point]:
    """Sums over the links that were up at first: over other links a sum would jump, and seem to be reset."""
    for kind, counter in _NVLINK_ERRORS:
        counts = [pynvml.nvmlDeviceGetNvLinkErrorCounter(device.handle, link, counter) for link in device.nvlinks]
        if counts:
            yield "dflash_gpu_nvlink_errors_total", device.labels_with("kind", kind), float(sum(counts))


MEMORY_QUERY = Query(
    ("dflash_gpu_memory_used_bytes", "dflash_gpu_memory_reserved_bytes", "dflash_gpu_memory_total_bytes"), _memory
)
"""The only one that a MIG instance answers too."""
FAST_QUERIES = (
    Query(("dflash_gpu_utilization_ratio", "dflash_gpu_memory_utilization_ratio"), _utilization),
    MEMORY_QUERY,
    _one("dflash_gpu_power_watts", lambda h: float(pynvml.nvmlDeviceGetPowerUsage(h)) / 1e3),
    _one("dflash_gpu_power_limit_watts", lambda h: float(pynvml.nvmlDeviceGetEnforcedPowerLimit(h)) / 1e3),
    _one("dflash_gpu_energy_joules_total", lambda h: float(pynvml.nvmlDeviceGetTotalEnergyConsumption(h)) / 1e3),
    _one("dflash_gpu_temperature_celsius", _temperature),
    _one("dflash_gpu_sm_clock_hertz", lambda h: float(pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_SM)), 1e6),
    _one(
        "dflash_gpu_memory_clock_hertz", lambda h: float(pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_MEM)), 1e6
    ),
    _fields(_FAST_FIELDS),
)
SLOW_QUERIES = (
    _one(
        "dflash_gpu_sm_clock_max_hertz", lambda h: float(pynvml.nvmlDeviceGetMaxClockInfo(h, pynvml.NVML_CLOCK_SM)), 1e6
    ),
    _one(
        "dflash_gpu_memory_clock_max_hertz",
        lambda h: float(pynvml.nvmlDeviceGetMaxClockInfo(h, pynvml.NVML_CLOCK_MEM)),
        1e6,
    ),
    _ecc("dflash_gpu_ecc_errors_total", pynvml.NVML_VOLATILE_ECC),
    _ecc("dflash_gpu_ecc_errors_lifetime_total", pynvml.NVML_AGGREGATE_ECC),
    Query(
        ("dflash_gpu_remapped_rows_total", "dflash_gpu_remapping_pending", "dflash_gpu_remapping_failed"),
        _remapped_rows,
    ),
    _one("dflash_gpu_pcie_replays_total", lambda h: float(pynvml.nvmlDeviceGetPcieReplayCounter(h))),
    Query(("dflash_gpu_nvlink_errors_total",), _nvlink_errors),
    _one(
        "dflash_gpu_pcie_sampled_transmit_bytes_per_second",
        lambda h: float(pynvml.nvmlDeviceGetPcieThroughput(h, pynvml.NVML_PCIE_UTIL_TX_BYTES)),
        1e3,
    ),
    _one(
        "dflash_gpu_pcie_sampled_receive_bytes_per_second",
        lambda h: float(pynvml.nvmlDeviceGetPcieThroughput(h, pynvml.NVML_PCIE_UTIL_RX_BYTES)),
        1e3,
    ),
)
