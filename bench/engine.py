"""What evaluating definitions costs: 200 of them, once a second, over 500 series and over 50,000.

The series are those of a node with eight workers and eight GPUs, sampled once a second for five minutes and a half; the
50,000 are those of a hundred such nodes, over forty seconds. The definitions are of the kinds that ship, each over
ranges from 15 s to 5 min, no two alike.
"""

import gc
import random
import time
from collections.abc import Iterable, Iterator
from itertools import product
from statistics import median

from bench.results import Goal, Result, alone
from sidecar.promql.engine import evaluate
from sidecar.promql.nodes import Node
from sidecar.promql.syntax import parse
from sidecar.samples import Labels, Sample, labels_of
from sidecar.store import Store

START_S = 1_750_000_000.0
NUM_TICKS = 20
MAX_CORE_PERCENT = 2.0
WORKERS = {"target": range(6), "drafter": range(6, 8)}
PHASES = ("load", "forward", "pack", "d2h", "put", "get", "h2d", "backward", "reduce", "optimizer")
BOUNDS = (*(str(float(2**power)) for power in range(15)), "+Inf")
FAMILIES: list[tuple[str, dict[str, Iterable[object]]]] = [
    ("length_bucket", {"worker": WORKERS["drafter"], "le": BOUNDS}),
    ("length_sum", {"worker": WORKERS["drafter"]}),
    ("length_count", {"worker": WORKERS["drafter"]}),
    ("queue_depth", {"queue": "ab"}),
    ("queue_capacity", {"queue": "ab"}),
    ("queue_blocked_seconds_total", {"queue": "ab", "side": ("put", "get")}),
    ("cpu_seconds_total", {"cpu": range(64)}),
    ("thread_cpu_seconds_total", {"thread": range(96)}),
    ("accuracy_ratio", {"position": range(16)}),
]
ALLOCATOR = ("allocated", "reserved", "active", "inactive_split")
GPU = (
    *("utilization_ratio", "power_watts", "temperature_celsius", "clock_hertz"),
    *("memory_used_bytes", "memory_total_bytes", "pcie_bytes", "energy_joules_total"),
)
FAMILIES += [(f"allocator_{name}_bytes", {"device": range(8)}) for name in ALLOCATOR]
FAMILIES += [(f"gpu_{name}", {"device": range(8)}) for name in GPU]
for role, workers in WORKERS.items():
    FAMILIES += [
        ("batches_total", {"role": [role], "worker": workers}),
        ("tokens_total", {"role": [role], "worker": workers, "kind": ("real", "padding")}),
        ("phase_seconds_total", {"role": [role], "worker": workers, "phase": PHASES}),
        ("phase_calls_total", {"role": [role], "worker": workers, "phase": PHASES}),
    ]
RANGES = ("15s", "20s", "30s", "45s", "1m", "90s", "2m", "3m", "4m", "5m")
EXPRESSIONS = (
    'sum by (role) (rate(tokens_total{{kind="real"}}[{range}]))',
    'sum by (role) (rate(tokens_total{{kind="padding"}}[{range}])) / (sum by (role) (rate(tokens_total[{range}])) > 0)',
    "max by (role) (rate(batches_total[{range}])) / (avg by (role) (rate(batches_total[{range}])) > 0)",
    "max_over_time(queue_depth[{range}]) / queue_capacity",
    'sum(rate(queue_blocked_seconds_total{{side="put"}}[{range}])) / count(batches_total{{role="target"}})',
    "avg by (role, phase) (rate(phase_seconds_total[{range}]))",
    "sum by (phase) (rate(phase_seconds_total[{range}])) / (sum by (phase) (rate(phase_calls_total[{range}])) > 0)",
    "increase(length_sum[{range}]) / (increase(length_count[{range}]) > 0)",
    "histogram_quantile(0.95, sum by (le) (rate(length_bucket[{range}])))",
    "allocator_inactive_split_bytes / (avg_over_time(allocator_reserved_bytes[{range}]) > 0)",
    'sum(rate(tokens_total{{role="drafter"}}[{range}])) / (sum(rate(gpu_energy_joules_total[{range}])) > 0)',
    "avg(avg_over_time(accuracy_ratio[{range}]))",
    "avg_over_time(gpu_utilization_ratio[{range}])",
    "max_over_time(gpu_temperature_celsius[{range}]) > 60",
    "sum(rate(cpu_seconds_total[{range}]))",
    "topk(3, rate(thread_cpu_seconds_total[{range}]))",
    "quantile(0.9, avg_over_time(gpu_power_watts[{range}]))",
    "stddev by (role) (rate(batches_total[{range}]))",
    "gpu_memory_used_bytes / on (node, device) (max_over_time(gpu_memory_total_bytes[{range}]))",
    'clamp_max(sum by (worker) (rate(phase_seconds_total{{role="target", phase=~"forward|pack|put"}}[{range}])), 1)',
)


def definitions(num_rounds: int) -> list[Result]:
    """Share of a core for one evaluation a second, and seconds for one over 50,000 series."""
    nodes = definition_nodes()
    few = filled(list(series_of(1)), num_seconds=330)
    percent = [100 * _cpu_s_per_tick(nodes, few, 330, NUM_TICKS) for _ in range(num_rounds)]
    many = filled(list(series_of(100)), num_seconds=40)
    seconds = [_cpu_s_per_tick(nodes, many, 40, 1) for _ in range(num_rounds)]
    return [
        alone("definitions_200", "% of a core", percent, Goal("value", "<=", MAX_CORE_PERCENT)),
        alone("definitions_200_over_50000_series", "s", seconds),
    ]


def definition_nodes() -> list[Node]:
    """The definitions' expressions."""
    return [parse(expression.format(range=range_)) for range_ in RANGES for expression in EXPRESSIONS]


def series_of(num_nodes: int) -> Iterator[tuple[str, Labels]]:
    """Yield name and labels of each series."""
    for node, (name, labels) in product(range(num_nodes), FAMILIES):
        for values in product(*labels.values()):
            yield name, labels_of(node=str(node), **dict(zip(labels, map(str, values), strict=True)))


def filled(series: list[tuple[str, Labels]], num_seconds: int) -> Store:
    """A store with a sample a second of each series; counters never fall."""
    rng = random.Random(1)  # noqa: S311 - not for secrets
    store = Store(window_s=400.0)
    totals = [0.0] * len(series)
    for second in range(num_seconds):
        for index, (name, labels) in enumerate(series):
            totals[index] += rng.random()
            value = totals[index] if name.endswith(("_total", "_bucket", "_sum", "_count")) else 100 * rng.random()
            store.append(Sample(name, labels, START_S + second, value))
    return store


def _cpu_s_per_tick(nodes: list[Node], store: Store, num_seconds: int, num_ticks: int) -> float:
    """CPU seconds for all definitions at one time; the times differ, the newest samples do not."""
    gc.collect()
    costs_s = []
    for tick in range(num_ticks):
        start_s = time.process_time()
        for node in nodes:
            evaluate(node, store, START_S + num_seconds - 1 + tick / num_ticks)
        costs_s.append(time.process_time() - start_s)
    return median(costs_s)
