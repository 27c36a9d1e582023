"""Reads the trainer processes, their threads, and the limits on them and on the sidecar itself."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence

import psutil

from sidecar.collectors.catalogue import CGROUP_FAMILIES, PROCESS_FAMILIES, PROCESS_MEMORY_FAMILIES
from sidecar.collectors.cgroup import ControlGroups
from sidecar.collectors.reading import export
from sidecar.collectors.threads import ThreadTotals
from sidecar.collectors.watched import Watched
from sidecar.samples import ExportedFamily, Point, with_label

_MINOR_FAULTS, _MAJOR_FAULTS = 7, 9
"""Fields of `/proc/PID/stat` behind the name."""
_log = logging.getLogger(__name__)


class ProcessCollector:
    """Read trainer processes.

    Args:
        trainers: called for each reading; every live trainer whose process is known.
    """

    name = "process"

    def __init__(self, trainers: Callable[[], Sequence[Watched]]) -> None:
        self._trainers = trainers
        self._processes: dict[Watched, _Trainer] = {}
        self._groups = ControlGroups()

    def collect(self) -> tuple[ExportedFamily, ...]:
        """Read everything now; a process that is gone is left out, and so is what we may not read of one."""
        watched = self._trainers()
        for gone in self._processes.keys() - set(watched):
            self._processes.pop(gone).leave()
        values = [*self._groups.values(os.getpid(), "sidecar")]
        for one in watched:
            try:
                trainer = self._processes.setdefault(one, _Trainer(one))
                found = [*trainer.values(), *self._groups.values(one.process.pid, "trainer", one.labels)]
            except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                continue
            values += found
        return export((*PROCESS_FAMILIES, *CGROUP_FAMILIES), values)


class ProcessMemoryCollector:
    """Read what the end of a trainer process would free: the kernel walks all its pages for that, so do it seldom.

    Args:
        trainers: called for each reading; every live trainer whose process is known.
    """

    name = "process_memory"

    def __init__(self, trainers: Callable[[], Sequence[Watched]]) -> None:
        self._trainers = trainers

    def collect(self) -> tuple[ExportedFamily, ...]:
        """Read everything now; a trainer of another user is left out."""
        values: list[Point] = []
        for one in self._trainers():
            try:
                unique = one.process.memory_full_info().uss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue  # the process collector says so
            values.append(("dflash_process_unique_memory_bytes", one.labels, float(unique)))
        return export(PROCESS_MEMORY_FAMILIES, values)


class _Trainer:
    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._process = watched.process
        self._threads = ThreadTotals(watched.process, watched.proc / "task")
        self._is_denied = False

    def values(self) -> Iterator[Point]:
        """All points of this process; raises when it is gone."""
        labels = self._watched.labels
        with self._process.oneshot():
            times = self._process.cpu_times()
            yield "dflash_process_cpu_seconds_total", with_label(labels, "mode", "user"), times.user
            yield "dflash_process_cpu_seconds_total", with_label(labels, "mode", "system"), times.system
            yield "dflash_process_resident_memory_bytes", labels, float(self._process.memory_info().rss)
            yield "dflash_process_threads", labels, float(self._process.num_threads())
        stat = (self._watched.proc / "stat").read_bytes().rpartition(b")")[2].split()  # psutil leaves the faults out
        for kind, field in (("minor", _MINOR_FAULTS), ("major", _MAJOR_FAULTS)):
            yield "dflash_process_page_faults_total", with_label(labels, "kind", kind), float(stat[field])
        yield from self._private()
        yield from self._threads.values(labels)

    def leave(self) -> None:
        """Say that what was denied no longer matters."""
        if self._is_denied:
            _log.info("%s, of which not all could be read, is gone", self._watched)

    def _private(self) -> Iterator[Point]:
        """What the kernel shows to the same user alone."""
        labels = self._watched.labels
        try:
            num_fds, disk = self._process.num_fds(), self._process.io_counters()
        except psutil.AccessDenied:
            if not self._is_denied:
                self._is_denied = True
                user = self._process.username()
                _log.warning(
                    "%s belongs to %s: its open files, disk bytes and unique memory cannot be read and are left out",
                    *(self._watched, user),
                )
            return
        if self._is_denied:
            self._is_denied = False
            _log.info("%s can be read in full now", self._watched)
        yield "dflash_process_open_fds", labels, float(num_fds)
        yield "dflash_process_disk_read_bytes_total", labels, float(disk.read_bytes)
        yield "dflash_process_disk_written_bytes_total", labels, float(disk.write_bytes)
