"""Whether the machine was quiet enough to believe the figures: what others used of it while the bench did nothing."""

import os
import time

import psutil

from bench.results import Goal, Result, alone

SAMPLE_S = 1.0
MAX_OTHER_LOAD_CORES = 0.1


def other_load_cores() -> float:
    """Cores that are busy with, or taken away by, something else; call it while nothing of the bench runs."""
    before, start_s = psutil.cpu_times(), time.monotonic()
    time.sleep(SAMPLE_S)
    after, elapsed_s = psutil.cpu_times(), time.monotonic() - start_s
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    busy_s: float = sum(getattr(after, name) - getattr(before, name) for name in names)
    return busy_s / elapsed_s


def disturbance(samples_cores: list[float]) -> Result:
    """The worst sample as a result of its own: unmet, it says that every other figure is provisional."""
    return alone("other_load", "cores", samples_cores, Goal("value", "<=", MAX_OTHER_LOAD_CORES), figure=max)


def description() -> str:
    """The machine in a line."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()
    return f"{cores} cores, load average {load[0]:.2f} {load[1]:.2f} {load[2]:.2f}"
