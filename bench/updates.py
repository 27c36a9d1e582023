"""One update of one counter: ours, prometheus_client's, and a call of wandb.log.

Each is called in a plain loop, so a figure includes the loop and the call itself. wandb.log writes to wandb's own
process, which is why a round takes few of them.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import wandb
from prometheus_client import CollectorRegistry, Counter

from bench.results import Goal, Result, compare
from bench.workplace import WandbServer, Workplace
from shared import cells
from shared.catalogue import TRAINER_FAMILIES

NUM_UPDATES = 200_000
NUM_LOGS = 300
NS_PER_S = 1e9
MAX_UPDATE_NS = 100.0


def counter_update(num_rounds: int) -> list[Result]:
    """Nanoseconds per update."""
    labels = {"role": "drafter", "worker": "0", "kind": "real"}
    ours = cells.Cells(TRAINER_FAMILIES).counter("dflash_tokens_total", **labels)
    family = Counter("tokens", "Tokens.", list(labels), registry=CollectorRegistry())
    theirs = family.labels(*labels.values())
    update_ns: dict[str, list[float]] = {"ours": [], "prometheus": [], "labels": [], "wandb": []}
    with Workplace() as place, wandb_run(place, place.wandb_server()) as run:
        for _ in range(num_rounds):
            update_ns["ours"].append(_ns_per_call(lambda: _add(ours)))
            update_ns["prometheus"].append(_ns_per_call(lambda: _inc(theirs)))
            update_ns["labels"].append(_ns_per_call(lambda: _inc_labels(family)))
            update_ns["wandb"].append(_ns_per_call(lambda: _log(run), NUM_LOGS))
            time.sleep(0.5)  # wandb's process works off what it was given
    goal = Goal("value", "<=", MAX_UPDATE_NS)
    return [
        compare("counter_update", "ns", update_ns["ours"], "prometheus_client inc", update_ns["prometheus"], goal),
        compare(
            "counter_update_by_labels", "ns", update_ns["ours"], "prometheus_client labels().inc", update_ns["labels"]
        ),
        compare("counter_update_beside_wandb", "ns", update_ns["ours"], "wandb.log of 1 key", update_ns["wandb"]),
    ]


@contextmanager
def wandb_run(place: Workplace, server: WandbServer) -> Iterator[wandb.Run]:
    """A run of the real SDK in this process, with its defaults, against a stand-in server."""
    settings = wandb.Settings(
        base_url=server.environ["WANDB_BASE_URL"],
        api_key=server.environ["WANDB_API_KEY"],
        root_dir=str(place.path),
        silent=True,
        disable_git=True,
    )
    run = wandb.init(project="bench", settings=settings)
    try:
        yield run
    finally:
        run.finish()


def _ns_per_call(loop: Callable[[], None], num_calls: int = NUM_UPDATES) -> float:
    gc.collect()
    start_ns = time.perf_counter_ns()
    loop()
    return (time.perf_counter_ns() - start_ns) / num_calls


def _add(counter: cells.Counter) -> None:
    for _ in range(NUM_UPDATES):
        counter.add(1.0)


def _inc(counter: Counter) -> None:
    for _ in range(NUM_UPDATES):
        counter.inc(1.0)


def _inc_labels(family: Counter) -> None:
    for _ in range(NUM_UPDATES):
        family.labels("drafter", "0", "real").inc(1.0)


def _log(run: wandb.Run) -> None:
    for _ in range(NUM_LOGS):
        run.log({"tokens": 1.0})
