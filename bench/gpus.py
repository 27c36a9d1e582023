"""What GPU telemetry costs, beside `nvitop-exporter` on the same fake driver: eight H200, each read once a second.

Both run side by side all the time and are measured over the same seconds: CPU time of the process, its memory, and one
scrape every 15 s, as Prometheus does by default. Then both are scraped in turns, at intervals in which each has new
values, so that every scrape pays for its page. The peer shows fewer series, so each figure is also given per series.
The driver is the stand-in of the tests: its calls cost microseconds and belong to both.
"""

import socket
import time
from collections.abc import Mapping
from typing import NamedTuple

import psutil

from bench.results import Goal, Result, compare, quantile
from bench.workplace import ROOT, BenchmarkError, Workplace, cpu_seconds, fetch

PEER = "nvitop-exporter"
PEER_PYTHON = ROOT / ".venv-exporter" / "bin" / "python"
WARM_UP_S = 5.0
TURN_S = 15.0
NUM_SCRAPES = 40
SCRAPE_PAUSE_S = 0.55
"""Longer than the sidecar takes from one result to the next."""
MAX_CORE_PERCENT, MAX_RSS_MB, MAX_SCRAPE_MS = 1.0, 80.0, 15.0


class Exporter(NamedTuple):
    """A process with a page."""

    pid: int
    url: str

    def scrape_ms(self) -> float:
        """Get the page."""
        start_s = time.perf_counter()
        fetch(self.url, "/metrics")
        return (time.perf_counter() - start_s) * 1e3

    def num_series(self) -> int:
        """Series on the page."""
        return sum(not line.startswith(b"#") for line in fetch(self.url, "/metrics").splitlines())


class Cost(NamedTuple):
    """What one process took in one round."""

    core_percent: float
    rss_mb: float
    scrape_median_ms: float
    scrape_p99_ms: float


_FIGURES = (
    ("cpu", "% of a core", Goal("value", "<=", MAX_CORE_PERCENT)),
    ("rss", "MB", Goal("value", "<=", MAX_RSS_MB)),
    ("scrape_median", "ms", None),
    ("scrape_p99", "ms", Goal("value", "<=", MAX_SCRAPE_MS)),
)
"""Name and unit of each figure of a cost, in its order."""


def gpus(num_rounds: int) -> list[Result]:
    """CPU, memory and scrape times, each also per series."""
    with Workplace() as place:
        machine = place.popen(("-m", "bench.gpu_machine", str(place.path)))
        place.wait(lambda: machine.poll() is not None, machine, "the fake driver")
        environ = dict(line.split("=", 1) for line in place.output(machine).splitlines())
        sidecar = place.sidecar(("--set", "wandb.mode=off", "--set", "collectors.interval_s=1"), environ)
        both = (Exporter(sidecar.process.pid, sidecar.url), _peer(place, environ))
        time.sleep(WARM_UP_S)
        rounds = [_costs(both) for _ in range(num_rounds)]
        num_series = [exporter.num_series() for exporter in both]
    results = []
    for index, (name, unit, goal) in enumerate(_FIGURES):
        ours, theirs = ([costs[side][index] for costs in rounds] for side in (0, 1))
        results.append(compare(f"gpus_{name}", unit, ours, PEER, theirs, goal))
        ours, theirs = ([1000 * v / n for v in values] for values, n in zip((ours, theirs), num_series, strict=True))
        each = f"{unit} per 1000 series"
        results.append(compare(f"gpus_{name}_per_series", each, ours, PEER, theirs, Goal("ratio", "<=", 1.0)))
    return [*results, compare("gpus_series", "series", num_series[:1], PEER, num_series[1:])]


def _costs(both: tuple[Exporter, Exporter]) -> list[Cost]:
    """One round."""
    start_s, before_s = time.monotonic(), [cpu_seconds(exporter.pid) for exporter in both]
    for exporter in both:
        exporter.scrape_ms()
    time.sleep(TURN_S)
    cpu_s = [cpu_seconds(exporter.pid) - before for exporter, before in zip(both, before_s, strict=True)]
    elapsed_s = time.monotonic() - start_s
    times_ms: tuple[list[float], list[float]] = ([], [])
    for _ in range(NUM_SCRAPES):
        time.sleep(SCRAPE_PAUSE_S)
        for exporter, its_times_ms in zip(both, times_ms, strict=True):
            its_times_ms.append(exporter.scrape_ms())
    return [
        Cost(
            core_percent=100 * used_s / elapsed_s,
            rss_mb=psutil.Process(exporter.pid).memory_info().rss / 1e6,
            scrape_median_ms=quantile(its_times_ms, 0.5),
            scrape_p99_ms=quantile(its_times_ms, 0.99),
        )
        for exporter, used_s, its_times_ms in zip(both, cpu_s, times_ms, strict=True)
    ]


def _peer(place: Workplace, environ: Mapping[str, str]) -> Exporter:
    if not PEER_PYTHON.exists():
        raise BenchmarkError(f"{PEER_PYTHON} is missing: `make bench` makes the environment of {PEER}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = ("-m", "nvitop_exporter", "--bind-address", "127.0.0.1", "--port", str(port), "--interval", "1")
    process = place.popen(arguments, {**environ, "PYTHONPATH": ""}, PEER_PYTHON)
    exporter = Exporter(process.pid, f"http://127.0.0.1:{port}")

    def answers() -> bool:
        try:
            return bool(fetch(exporter.url, "/metrics"))
        except OSError:
            return False

    place.wait(answers, process, f"{PEER} to answer")
    return exporter
