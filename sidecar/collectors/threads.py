"""What the threads of a trainer did, summed by name: time on a CPU, time waiting for one, and how they left it.

Several threads may share a name (a pool), change it, or end. So what each did since the last reading is added to the
name it has now, and no total ever goes backwards; after a restart of the sidecar only the living are known, which
Prometheus sees as an ordinary counter reset. Names beyond a bound share the name `other`, because a thread can be
named anything.

A thread that is ready but waits for a CPU has its waiting time grow. One that waits for the GIL sleeps: it has little
time on a CPU, little waiting time, and leaves its CPU voluntarily about 200 times a second: it asks again every 5 ms.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from sidecar.collectors.kernel_file import read_kernel_file
from sidecar.samples import Labels, Point, with_label

MAX_THREAD_NAMES = 64
_NANOSECOND = 1e-9


class Work(NamedTuple):
    """What a thread did since it began. None is what this kernel does not say."""

    cpu_s: float
    wait_s: float | None
    voluntary: float
    involuntary: float

    def since(self, before: "Work | None") -> "Work":
        """What was done after `before`; all of it when that was another thread with the same number."""
        if before is None or before.cpu_s > self.cpu_s:
            return self
        wait_s = None if self.wait_s is None else self.wait_s - (before.wait_s or 0.0)
        voluntary, involuntary = self.voluntary - before.voluntary, self.involuntary - before.involuntary
        return Work(self.cpu_s - before.cpu_s, wait_s, voluntary, involuntary)

    def plus(self, more: "Work") -> "Work":
        """Both together."""
        wait_s = self.wait_s if more.wait_s is None else more.wait_s + (self.wait_s or 0.0)
        voluntary, involuntary = self.voluntary + more.voluntary, self.involuntary + more.involuntary
        return Work(self.cpu_s + more.cpu_s, wait_s, voluntary, involuntary)


class ThreadTotals:
    """The threads of one process.

    Args:
        process: whose they are.
        directory: where the kernel lists them.
    """

    def __init__(self, process: psutil.Process, directory: Path) -> None:
        self._process = process
        self._directory = directory
        self._has_schedstat = (directory.parent / "schedstat").exists()
        self._seen: dict[str, Work] = {}
        self._totals: dict[str, Work] = {}

    def values(self, labels: Labels) -> Iterator[Point]:
        """All points, as of now."""
        self._count()
        for name, work in self._totals.items():
            own = with_label(labels, "thread", name)
            yield "dflash_process_thread_cpu_seconds_total", own, work.cpu_s
            if work.wait_s is not None:
                yield "dflash_process_thread_runqueue_wait_seconds_total", own, work.wait_s
            switches = "dflash_process_thread_context_switches_total"
            yield switches, with_label(own, "kind", "voluntary"), work.voluntary
            yield switches, with_label(own, "kind", "involuntary"), work.involuntary

    def _count(self) -> None:
        living = {}
        ticks_s: dict[str, float] = {}
        if not self._has_schedstat:
            ticks_s = {str(thread.id): thread.user_time + thread.system_time for thread in self._process.threads()}
        for thread in os.listdir(self._directory):  # noqa: PTH208 - names, not paths
            try:
                name, voluntary, involuntary = _status(f"{self._directory}/{thread}/status")
                on_cpu = _schedule(f"{self._directory}/{thread}/schedstat") if self._has_schedstat else None
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended since the list was read
            cpu_s, wait_s = on_cpu or (ticks_s.get(thread, 0.0), None)
            work = living[thread] = Work(cpu_s, wait_s, voluntary, involuntary)
            if name not in self._totals and len(self._totals) >= MAX_THREAD_NAMES:
                name = "other"
            done = work.since(self._seen.get(thread))
            self._totals[name] = self._totals[name].plus(done) if name in self._totals else done
        self._seen = living


def _status(path: str) -> tuple[str, float, float]:
    """Name of a thread and how often it left its CPU, of itself and not; psutil knows it of the main thread alone."""
    text = read_kernel_file(path)
    name = text[len(b"Name:") : text.index(b"\n")].strip().decode(errors="replace")
    voluntary, involuntary = (_number(text, key) for key in (b"\nvoluntary_ctxt_", b"\nnonvoluntary_ctxt_"))
    return name, voluntary, involuntary


def _number(text: bytes, key: bytes) -> float:
    start = text.index(b"\t", text.index(key))
    return float(text[start : text.index(b"\n", start)])


def _schedule(path: str) -> tuple[float, float]:
    """Seconds on a CPU, and seconds ready but without one."""
    cpu_ns, wait_ns, _ = read_kernel_file(path).split()
    return float(cpu_ns) * _NANOSECOND, float(wait_ns) * _NANOSECOND
