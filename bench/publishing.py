"""What publishing 500 series costs the trainer: CPU of the telemetry thread, and pauses of a thread that computes.

A real publisher sends to a real subscriber in another process. Its peers render the same 500 series with
prometheus_client's `generate_latest`, or hand 500 keys to `wandb.log`.
"""

import gc
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from bench.results import Goal, Result, alone, compare, quantile
from bench.updates import wandb_run
from bench.workplace import Workplace
from shared.cells import Cells
from shared.endpoint import EndpointClaim, socket_path
from shared.publisher import Identity, Publisher
from shared.schema import Family

NUM_SERIES = 500
NUM_FAMILIES = 5
NUM_PUBLISHES = 50
PUBLISH_INTERVAL_S = 0.02
MAX_PUBLISH_US = 300.0
US_PER_S = 1e6
STALL_INTERVAL_S = 0.1
STALL_S = 2.0
WORK_ITEMS = 200
"""Sums so many numbers between two looks at the clock, which takes a few microseconds."""


def publish_500_series(num_rounds: int) -> list[Result]:
    """CPU microseconds per publish, of the thread that does it."""
    ours, prometheus, logged = list[tuple[float, float]](), list[float](), list[float]()
    registry, log = prometheus_registry(), {f"series/{i}": float(i) for i in range(NUM_SERIES)}
    with Workplace() as place, wandb_run(place, place.wandb_server()) as run:
        for index in range(num_rounds):
            ours.append(measure_publish(place, f"round-{index}"))
            prometheus.append(_thread_us(lambda: generate_latest(registry)))
            logged.append(_thread_us(lambda: run.log(log)))
            time.sleep(0.5)  # wandb's process works off what it was given
    goal = Goal("value", "<=", MAX_PUBLISH_US)
    publishes, intervals = [publish for publish, _ in ours], [interval for _, interval in ours]
    return [
        compare("publish_500_series", "us", publishes, "prometheus_client generate_latest", prometheus, goal),
        compare("publish_500_series_beside_wandb", "us", publishes, "wandb.log of 500 keys", logged),
        alone("publish_500_series_with_wait", "us", intervals),
    ]


def stall(num_rounds: int) -> list[Result]:
    """The longest times that a computing thread does not get on, alone and beside 500 series at 10 Hz."""
    gaps_us: dict[str, list[array[float]]] = {"alone": [], "published": [], "rendered": []}
    registry = prometheus_registry()
    with Workplace() as place:
        for index in range(num_rounds):
            gaps_us["alone"].append(_gaps_us())
            with publishing(place, f"stall-{index}", STALL_INTERVAL_S):
                gaps_us["published"].append(_gaps_us())
            with _repeating(lambda: generate_latest(registry), STALL_INTERVAL_S):
                gaps_us["rendered"].append(_gaps_us())
    longest = {name: [max(gaps) for gaps in rounds] for name, rounds in gaps_us.items()}
    p999 = {name: [quantile(gaps, 0.999) for gaps in rounds] for name, rounds in gaps_us.items()}
    return [
        compare("training_stall_max", "us", longest["published"], "no telemetry", longest["alone"]),
        compare("training_stall_p999", "us", p999["published"], "no telemetry", p999["alone"]),
        compare(
            "training_stall_max_beside_prometheus",
            "us",
            longest["published"],
            "prometheus_client generate_latest",
            longest["rendered"],
        ),
    ]


def prometheus_registry() -> CollectorRegistry:
    """500 gauges, as prometheus_client keeps them."""
    registry = CollectorRegistry()
    for family in range(NUM_FAMILIES):
        gauge = Gauge(f"dflash_family_{family}", "A family.", ["worker"], registry=registry)
        for worker in range(NUM_SERIES // NUM_FAMILIES):
            gauge.labels(str(worker)).set(worker)
    return registry


class TimedPublisher(Publisher):
    """Notes the CPU time of the telemetry thread before and after each publish; the lists are read when it ends."""

    def __init__(self, cells: Cells, name: str, path: Path, interval_s: float) -> None:
        identity = Identity(run_id=name, session=name, pid=os.getpid(), start_time_s=time.time())
        super().__init__(cells=cells, identity=identity, path=path, interval_s=interval_s, linger_s=0.0)
        self.starts_s: list[float] = []
        self.ends_s: list[float] = []

    def _tick(self) -> None:
        self.starts_s.append(time.thread_time())
        super()._tick()
        self.ends_s.append(time.thread_time())


@contextmanager
def publishing(place: Workplace, name: str, interval_s: float) -> Iterator[TimedPublisher]:
    """A publisher of 500 gauges with a subscriber that takes everything."""
    families = [Family(f"dflash_family_{i}", "gauge", "A family.", ("worker",)) for i in range(NUM_FAMILIES)]
    cells = Cells(families)
    for family in families:
        for worker in range(NUM_SERIES // NUM_FAMILIES):
            cells.gauge(family.name, worker=str(worker)).set(worker)
    path = socket_path(place.runtime_dir, name, 0)
    with EndpointClaim(path):
        publisher = TimedPublisher(cells, name, path, interval_s)
        publisher.start()
        subscriber = place.popen(("-m", "bench.subscriber", str(path)))
        place.wait(lambda: "receiving" in place.output(subscriber), subscriber, "the subscriber")
        try:
            yield publisher
        finally:
            publisher.close(0)
            place.end(subscriber)


def measure_publish(place: Workplace, name: str) -> tuple[float, float]:
    """CPU microseconds of a publish, and of all that the thread does from one publish to the next."""
    with publishing(place, name, PUBLISH_INTERVAL_S) as publisher:
        first = len(publisher.ends_s)
        time.sleep(NUM_PUBLISHES * PUBLISH_INTERVAL_S)
    # The last one is the goodbye's.
    starts_s, ends_s = publisher.starts_s[first:-1], publisher.ends_s[first:-1]
    publishes = [(end_s - start_s) * US_PER_S for start_s, end_s in zip(starts_s, ends_s, strict=True)]
    return median(publishes), (starts_s[-1] - starts_s[0]) / (len(starts_s) - 1) * US_PER_S


def _thread_us(call: Callable[[], object]) -> float:
    call()
    start_s = time.thread_time()
    for _ in range(NUM_PUBLISHES):
        call()
    return (time.thread_time() - start_s) / NUM_PUBLISHES * US_PER_S


def _gaps_us() -> "array[float]":
    """Times between looks at the clock of a thread that computes without a pause."""
    gaps_us = array("d")
    gc.collect()
    gc.disable()
    last_ns = time.perf_counter_ns()
    end_ns = last_ns + int(STALL_S * 1e9)
    while last_ns < end_ns:
        sum(range(WORK_ITEMS))
        now_ns = time.perf_counter_ns()
        gaps_us.append((now_ns - last_ns) / 1e3)
        last_ns = now_ns
    gc.enable()
    return gaps_us


@contextmanager
def _repeating(call: Callable[[], object], interval_s: float) -> Iterator[None]:
    """Call something on another thread at an interval."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(interval_s):
            call()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
