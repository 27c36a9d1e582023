"""Reads the host: CPU, memory, swap, network, and the disks that hold our directories."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from sidecar.collectors.catalogue import HOST_FAMILIES
from sidecar.collectors.reading import Value, export
from sidecar.samples import ExportedFamily, labels_of

_CPU_MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
"""Without guest time, which the kernel counts as user time already."""
_VIRTUAL_INTERFACES = ("lo", "veth", "docker", "br-", "virbr", "cni", "flannel", "cali")
"""Loopback and the inner ends of bridges: they come and go, and a physical interface counts their bytes too."""


class HostCollector:
    """Read the host.

    Args:
        directories: value of the `directory` label to the directory whose file system is watched.
    """

    name = "host"

    def __init__(self, directories: Mapping[str, Path]) -> None:
        self._directories = directories

    def collect(self) -> tuple[ExportedFamily, ...]:
        """Read everything now; a directory that is gone is left out."""
        return export(HOST_FAMILIES, [*_cpu(), *_memory(), *self._disks(), *_network()])

    def _disks(self) -> Iterator[Value]:
        for label, directory in self._directories.items():
            try:
                info = os.statvfs(directory)
            except FileNotFoundError:
                continue
            labels = labels_of(directory=label)
            yield "dflash_host_disk_total_bytes", labels, float(info.f_blocks * info.f_frsize)
            yield "dflash_host_disk_free_bytes", labels, float(info.f_bavail * info.f_frsize)


def _cpu() -> Iterator[Value]:
    times = psutil.cpu_times()
    for mode in _CPU_MODES:
        yield "dflash_host_cpu_seconds_total", labels_of(mode=mode), getattr(times, mode)
    yield "dflash_host_cpus", (), float(psutil.cpu_count() or 1)
    yield "dflash_host_load1", (), os.getloadavg()[0]


def _memory() -> Iterator[Value]:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    yield "dflash_host_memory_total_bytes", (), float(memory.total)
    yield "dflash_host_memory_available_bytes", (), float(memory.available)
    yield "dflash_host_swap_total_bytes", (), float(swap.total)
    yield "dflash_host_swap_used_bytes", (), float(swap.used)


def _network() -> Iterator[Value]:
    for interface, counters in psutil.net_io_counters(pernic=True).items():
        if not interface.startswith(_VIRTUAL_INTERFACES):
            labels = labels_of(interface=interface)
            yield "dflash_host_network_receive_bytes_total", labels, float(counters.bytes_recv)
            yield "dflash_host_network_transmit_bytes_total", labels, float(counters.bytes_sent)
