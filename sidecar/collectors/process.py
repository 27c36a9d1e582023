"""Reads the trainer processes and their threads by name.

Several threads may share a name (a pool), and a thread may end. The time of an ended thread stays in the sum of its
name, or the counter would go backwards; after a restart of the sidecar only the living are known, which Prometheus
sees as an ordinary counter reset. Names beyond a bound share the name `other`, because a thread can be named anything.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil

from sidecar.collectors.catalogue import PROCESS_FAMILIES
from sidecar.collectors.reading import Value, export
from sidecar.samples import ExportedFamily, Labels

MAX_THREAD_NAMES = 64


class ProcessCollector:
    """Read trainer processes.

    Args:
        trainers: called for each reading; process id of every live trainer to the labels its series carry.
    """

    name = "process"

    def __init__(self, trainers: Callable[[], Mapping[int, Labels]]) -> None:
        self._trainers = trainers
        self._processes: dict[int, _Trainer] = {}

    def collect(self) -> tuple[ExportedFamily, ...]:
        """Read everything now; a process that is gone is left out, and so is what we may not read of one."""
        trainers = self._trainers()
        self._processes = {pid: t for pid, t in self._processes.items() if pid in trainers and t.process.is_running()}
        values: list[Value] = []
        for pid, labels in trainers.items():
            try:
                trainer = self._processes.get(pid) or _Trainer(pid)
                values += trainer.values(labels)
            except psutil.NoSuchProcess:
                continue
            self._processes[pid] = trainer
        return export(PROCESS_FAMILIES, values)


class _Trainer:
    def __init__(self, pid: int) -> None:
        self.process = psutil.Process(pid)
        self._tasks = Path(psutil.PROCFS_PATH) / str(pid) / "task"
        self._threads: dict[int, tuple[str, float]] = {}
        self._ended_s: dict[str, float] = {}
        self._names: set[str] = set()

    def values(self, labels: Labels) -> list[Value]:
        """All points of this process; raises psutil.NoSuchProcess."""
        with self.process.oneshot():
            times = self.process.cpu_times()
            values: list[Value] = [
                ("dflash_process_cpu_seconds_total", _with(labels, "mode", "user"), times.user),
                ("dflash_process_cpu_seconds_total", _with(labels, "mode", "system"), times.system),
                ("dflash_process_resident_memory_bytes", labels, float(self.process.memory_info().rss)),
                ("dflash_process_threads", labels, float(self.process.num_threads())),
            ]
        with contextlib.suppress(psutil.AccessDenied):  # of another user's trainer the kernel shows all but this
            values.append(("dflash_process_open_fds", labels, float(self.process.num_fds())))
        for name, cpu_s in self._thread_seconds().items():
            values.append(("dflash_process_thread_cpu_seconds_total", _with(labels, "thread", name), cpu_s))
        return values

    def _thread_seconds(self) -> dict[str, float]:
        living = dict(self._living_threads())
        for thread, (name, cpu_s) in self._threads.items():
            if thread not in living or living[thread][0] != name:
                self._ended_s[name] = self._ended_s.get(name, 0.0) + cpu_s
        self._threads = living
        total_s = dict(self._ended_s)
        for name, cpu_s in living.values():
            total_s[name] = total_s.get(name, 0.0) + cpu_s
        return total_s

    def _living_threads(self) -> Iterator[tuple[int, tuple[str, float]]]:
        for thread in self.process.threads():
            try:
                name = (self._tasks / str(thread.id) / "comm").read_text(errors="replace").strip()
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended since the list was read
            if name not in self._names and len(self._names) >= MAX_THREAD_NAMES:
                name = "other"
            self._names.add(name)
            yield thread.id, (name, thread.user_time + thread.system_time)


def _with(labels: Labels, name: str, value: str) -> Labels:
    return tuple(sorted((*labels, (name, value))))
