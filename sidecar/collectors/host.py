"""Reads the host: CPU, memory, swap, network, and how long tasks waited for any of them."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from sidecar.collectors.catalogue import HOST_FAMILIES
from sidecar.collectors.pressure import pressure_of
from sidecar.collectors.reading import export
from sidecar.samples import ExportedFamily, Point, labels_of

_CPU_MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
"""Without guest time, which the kernel counts as user time already."""
_VIRTUAL_INTERFACES = ("lo", "veth", "docker", "br-", "virbr", "cni", "flannel", "cali")
"""Loopback and the inner ends of bridges: they come and go, and a physical interface counts their bytes too."""


class HostCollector:
    """Read the host."""

    name = "host"

    def collect(self) -> tuple[ExportedFamily, ...]:
        """Read everything now."""
        values = [*_cpu(), *_memory(), *_network()]
        for resource, kind, waited_s in pressure_of(Path(psutil.PROCFS_PATH) / "pressure", suffix=""):
            values.append(("dflash_host_pressure_seconds_total", labels_of(resource=resource, kind=kind), waited_s))
        return export(HOST_FAMILIES, values)


def _cpu() -> Iterator[Point]:
    times = psutil.cpu_times()
    for mode in _CPU_MODES:
        yield "dflash_host_cpu_seconds_total", labels_of(mode=mode), getattr(times, mode)
    yield "dflash_host_cpus", (), float(psutil.cpu_count() or 1)
    yield "dflash_host_load1", (), os.getloadavg()[0]


def _memory() -> Iterator[Point]:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    yield "dflash_host_memory_total_bytes", (), float(memory.total)
    yield "dflash_host_memory_available_bytes", (), float(memory.available)
    yield "dflash_host_swap_total_bytes", (), float(swap.total)
    yield "dflash_host_swap_used_bytes", (), float(swap.used)


def _network() -> Iterator[Point]:
    for interface, counters in psutil.net_io_counters(pernic=True).items():
        if not interface.startswith(_VIRTUAL_INTERFACES):
            labels = labels_of(interface=interface)
            yield "dflash_host_network_receive_bytes_total", labels, float(counters.bytes_recv)
            yield "dflash_host_network_transmit_bytes_total", labels, float(counters.bytes_sent)
