"""Training throughput under each way to watch it: nothing, ours, and what one would otherwise put into the loop.

Contestants are started one after the other and then take turns of a few seconds: one runs with the whole machine to
itself, the others stand still. So a round is short, and what slows the machine for longer than that slows all of them.
A step that a stop fell into is not counted.

Timers go on while a contestant stands still, so what it does every 5 or 15 seconds comes due in almost every turn:
telemetry and its peers are charged more for it here than in a run without stops.
"""

from collections.abc import Mapping

from bench.contestants import Contestant
from bench.results import Goal, Result, compare
from bench.watched_runs import (
    beside_sidecar,
    make_target,
    unwatched,
    with_prometheus,
    with_wandb,
    with_wandb_that_hangs,
)
from bench.workplace import Workplace, progress

TURN_S = 3.0
TURNS_PER_ROUND = 3
NOTHING = "no telemetry, no sidecar"
MIN_RATIO = 0.99


def training_throughput(num_rounds: int) -> list[Result]:
    """Steps per second with telemetry and a live sidecar, and with two instrumented loops, against neither."""
    make_target()
    with Workplace() as place:
        contestants = {
            "off": unwatched(place),
            "ours": beside_sidecar(place, place.wandb_server()),
            "wandb": with_wandb(place, place.wandb_server()),
            "prometheus": with_prometheus(place),
        }
        speeds = _take_turns(contestants, num_rounds * TURNS_PER_ROUND)
    goal, unit, off = Goal("ratio", ">=", MIN_RATIO), "steps/s", speeds["off"]
    return [
        compare("training_throughput", unit, speeds["ours"], NOTHING, off, goal),
        compare("training_throughput_wandb_in_trainer", unit, speeds["wandb"], NOTHING, off),
        compare("training_throughput_prometheus_in_trainer", unit, speeds["prometheus"], NOTHING, off),
    ]


def hung_server_throughput(num_rounds: int) -> list[Result]:
    """The same when the W&B server takes requests and never answers.

    For our sidecar it hangs from the start; `wandb.log` in the trainer would not begin, so there it hangs later.
    """
    make_target()
    with Workplace() as place:
        contestants = {
            "off": unwatched(place),
            "ours": beside_sidecar(place, place.wandb_server(hung=True)),
            "wandb": with_wandb_that_hangs(place),
        }
        speeds = _take_turns(contestants, num_rounds)
    return [
        compare("hung_server_throughput", "steps/s", speeds["ours"], NOTHING, speeds["off"]),
        compare("hung_server_throughput_wandb_in_trainer", "steps/s", speeds["wandb"], NOTHING, speeds["off"]),
    ]


def _take_turns(contestants: Mapping[str, Contestant], num_turns: int) -> dict[str, list[float]]:
    """Steps per second of each turn of each contestant; who begins changes from turn to turn."""
    names = list(contestants)
    speeds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(num_turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            speeds[name].append(contestants[name].run_for(TURN_S))
        progress(f"turn {turn + 1}/{num_turns}: " + ", ".join(f"{n} {speeds[n][-1]:.2f}" for n in names) + " steps/s")
    return speeds
