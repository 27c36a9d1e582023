"""GPU performance monitoring of Hopper and newer: rates between two samples, over all that ran in between."""

import math
from collections.abc import Iterator

import pynvml

from sidecar.collectors.nvml_device import Device
from sidecar.collectors.nvml_errors import GONE
from sidecar.collectors.nvml_queries import Query
from sidecar.samples import Point

_PERCENT = 0.01
_MIB = 1024.0**2
METRICS = (
    (pynvml.NVML_GPM_METRIC_SM_UTIL, "dflash_gpu_sm_utilization_ratio", _PERCENT),
    (pynvml.NVML_GPM_METRIC_SM_OCCUPANCY, "dflash_gpu_sm_occupancy_ratio", _PERCENT),
    (pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL, "dflash_gpu_tensor_utilization_ratio", _PERCENT),
    (pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL, "dflash_gpu_dram_utilization_ratio", _PERCENT),
    (pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC, "dflash_gpu_pcie_transmit_bytes_per_second", _MIB),
    (pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC, "dflash_gpu_pcie_receive_bytes_per_second", _MIB),
    (pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC, "dflash_gpu_nvlink_transmit_bytes_per_second", _MIB),
    (pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC, "dflash_gpu_nvlink_receive_bytes_per_second", _MIB),
)


class PerformanceMonitor:
    """Two samples of one GPU, written in turn. Their memory is the driver's and is released by its shutdown."""

    def __init__(self) -> None:
        self._samples: list[object] = []
        self._has_sample = False
        self._request = pynvml.c_nvmlGpmMetricsGet_t()
        self._request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(METRICS)
        for metric, (number, _, _) in zip(self._request.metrics, METRICS, strict=False):
            metric.metricId = number
        self.query = Query(tuple(family for _, family, _ in METRICS), self._read)

    def _read(self, device: Device) -> Iterator[Point]:
        if not self._samples:
            if not pynvml.nvmlGpmQueryDeviceSupport(device.handle).isSupportedDevice:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            self._samples = [pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()]
        older, newer = self._samples
        had_sample, self._has_sample = self._has_sample, False
        pynvml.nvmlGpmSampleGet(device.handle, newer)
        self._samples = [newer, older]
        self._has_sample = True
        if not had_sample:
            return
        self._request.sample1, self._request.sample2 = older, newer
        pynvml.nvmlGpmMetricsGet(self._request)
        for metric, (_, family, scale) in zip(self._request.metrics, METRICS, strict=False):
            if metric.nvmlReturn in GONE:
                raise pynvml.NVMLError(metric.nvmlReturn)
            if metric.nvmlReturn == pynvml.NVML_SUCCESS and math.isfinite(metric.value):
                yield family, device.labels, metric.value * scale
