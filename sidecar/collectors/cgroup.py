"""Reads the limits that control groups (containers, systemd units) put on a process, version 1 and 2.

A limit of a group above holds as well. So the tightest one on the way up is shown, the memory in use is that of the
group which has it, and the throttling of all groups on the way up is added. Of groups above the part that is mounted
here nothing is known. Where nothing limits, nothing is shown.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from sidecar.collectors.kernel_file import read_kernel_file
from sidecar.collectors.pressure import pressure_of
from sidecar.samples import Labels, Point, with_label

UNLIMITED_BYTES = 2**62
"""Version 1 writes the largest number it has."""
_NANOSECOND, _MICROSECOND = 1e-9, 1e-6


class Mount(NamedTuple):
    """One mounted hierarchy: which of its groups lies at which path, and its controllers (none: version 2)."""

    root: str
    path: Path
    controllers: tuple[str, ...]


def mounts_of(text: str) -> list[Mount]:
    """The hierarchies in the text of a `mountinfo`."""
    mounts = []
    for line in text.splitlines():
        fields, _, (kind, _, options) = (half := line.partition(" - "))[0].split(), half[1], half[2].split(" ", 2)
        if kind in {"cgroup", "cgroup2"}:
            controllers = tuple(options.split(",")) if kind == "cgroup" else ()
            mounts.append(Mount(fields[3], Path(fields[4]), controllers))
    return mounts


def groups_of(text: str, mounts: list[Mount], controller: str) -> list[tuple[Path, bool]]:
    """The groups of a process for a controller, its own first and those above it, and whether they are of version 2.

    Args:
        text: of `/proc/PID/cgroup`.
        mounts: what is mounted.
        controller: one of version 1 if that is mounted, else version 2 has it.
    """
    paths = {}
    for line in text.splitlines():
        _, names, path = line.split(":", 2)
        paths.update(dict.fromkeys(names.split(","), path))
    for name in (controller, ""):
        for mount in mounts:
            inside = _inside(paths.get(name, ""), mount.root)
            if name in (mount.controllers or ("",)) and inside is not None:
                groups = [mount.path.joinpath(*inside[:end]) for end in range(len(inside), -1, -1)]
                return [(group, not mount.controllers) for group in groups]
    return []


def _inside(path: str, root: str) -> tuple[str, ...] | None:
    """The way from the root of a mount to a group; None when it lies elsewhere."""
    parts, root_parts = Path(path).parts[1:], Path(root).parts[1:]
    if not path or ".." in parts or parts[: len(root_parts)] != root_parts:
        return None
    return parts[len(root_parts) :]


class ControlGroups:
    """Read the limits of processes of this machine."""

    def __init__(self) -> None:
        self._text = ""
        self._mounts: list[Mount] = []

    def values(self, pid: int, whose: str, labels: Labels = ()) -> Iterator[Point]:
        """All points of one process; raises psutil.NoSuchProcess."""
        try:
            text = (Path(psutil.PROCFS_PATH) / str(pid) / "cgroup").read_text(errors="surrogateescape")
        except (FileNotFoundError, ProcessLookupError):
            raise psutil.NoSuchProcess(pid) from None
        if not self._mounts:
            self._mounts = mounts_of((Path(psutil.PROCFS_PATH) / "self/mountinfo").read_text(errors="surrogateescape"))
        yield from values_of(text, self._mounts, with_label(labels, "process", whose))


def values_of(text: str, mounts: list[Mount], labels: Labels) -> Iterator[Point]:
    """All points for the text of a `/proc/PID/cgroup`."""
    cpu, memory = (groups_of(text, mounts, controller) for controller in ("cpu", "memory"))
    quotas = [quota for group, is_v2 in cpu if (quota := _cpu_limit(group, is_v2=is_v2)) is not None]
    if quotas:
        yield "dflash_cgroup_cpu_limit_cpus", labels, min(quotas)
    yield from _throttling(cpu, labels)
    yield from _memory(memory, labels)
    for group, is_v2 in cpu[:1]:
        for resource, kind, waited_s in pressure_of(group, suffix=".pressure") if is_v2 else ():
            own = with_label(with_label(labels, "resource", resource), "kind", kind)
            yield "dflash_cgroup_pressure_seconds_total", own, waited_s


def _cpu_limit(group: Path, *, is_v2: bool) -> float | None:
    text = (
        _read(group / "cpu.max")
        if is_v2
        else f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}"
    )
    match text.split():
        case [quota, period] if quota not in {"max", "-1"}:
            return float(quota) / float(period)
    return None


def _throttling(groups: list[tuple[Path, bool]], labels: Labels) -> Iterator[Point]:
    tables = [_table(group / "cpu.stat") for group, _ in groups]
    tables = [table for table in tables if "nr_periods" in table]
    if tables:
        periods, throttled = (sum(table[key] for table in tables) for key in ("nr_periods", "nr_throttled"))
        time_s = sum(
            t.get("throttled_usec", 0.0) * _MICROSECOND + t.get("throttled_time", 0.0) * _NANOSECOND for t in tables
        )
        yield "dflash_cgroup_cpu_periods_total", labels, periods
        yield "dflash_cgroup_cpu_throttled_periods_total", labels, throttled
        yield "dflash_cgroup_cpu_throttled_seconds_total", labels, time_s


def _memory(groups: list[tuple[Path, bool]], labels: Labels) -> Iterator[Point]:
    limits: list[tuple[float, str]] = []
    for group, is_v2 in groups:
        limit = _read(group / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
        if limit.isdigit() and int(limit) < UNLIMITED_BYTES:
            limits.append((float(limit), _read(group / ("memory.current" if is_v2 else "memory.usage_in_bytes"))))
    if limits:
        limit_bytes, used = min(limits)
        yield "dflash_cgroup_memory_limit_bytes", labels, limit_bytes
        if used:
            yield "dflash_cgroup_memory_bytes", labels, float(used)
    for group, is_v2 in groups[:1]:
        kills = _table(group / ("memory.events" if is_v2 else "memory.oom_control")).get("oom_kill")
        if kills is not None:
            yield "dflash_cgroup_oom_kills_total", labels, kills


def _table(path: Path) -> dict[str, float]:
    """A file of names and numbers."""
    return {name: float(number) for name, number in (line.split() for line in _read(path).splitlines())}


def _read(path: Path) -> str:
    """A file's text; empty when it is not there (another kernel, a controller that is off, a group that is gone)."""
    try:
        return read_kernel_file(path).decode().strip()
    except OSError:
        return ""
