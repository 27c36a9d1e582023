"""Pressure stall information: how long tasks waited for CPU, memory or storage, of the host or of a control group."""

from collections.abc import Iterator
from pathlib import Path

from sidecar.collectors.kernel_file import read_kernel_file

RESOURCES = ("cpu", "memory", "io")
_MICROSECOND = 1e-6


def pressure_of(directory: Path, *, suffix: str) -> Iterator[tuple[str, str, float]]:
    """Resource, kind (some or full) and seconds; nothing where the kernel does not count."""
    for resource in RESOURCES:
        try:
            lines = read_kernel_file(f"{directory}/{resource}{suffix}").decode().splitlines()
        except OSError:  # not there, or switched off (the read then fails)
            continue
        for line in lines:
            kind, *figures = line.split()
            yield resource, kind, float(figures[-1].removeprefix("total=")) * _MICROSECOND
