"""Training throughput under each way to watch it: nothing, ours, and what one would otherwise put into the loop.

Contestants are started one after the other and then take turns of a few seconds: one runs with the whole machine to
itself, the others stand still. So a round is short, and what slows the machine for longer than that slows all of them.
A step that a stop fell into is not counted.

Timers go on while a contestant stands still, so what it does every 5 or 15 seconds comes due in almost every turn:
telemetry and its peers are charged more for it here than in a run without stops.
"""

from collections.abc import Mapping, Sequence

from bench.contestants import Contestant, Turn
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
        turns = _take_turns(contestants, num_rounds * TURNS_PER_ROUND)
    speeds = {name: _speeds(taken) for name, taken in turns.items()}
    cpu_ms = {name: [turn.cpu_s_per_step * 1e3 for turn in taken] for name, taken in turns.items()}
    goal, unit, off = Goal("ratio", ">=", MIN_RATIO), "steps/s", speeds["off"]
    return [
        compare("training_throughput", unit, speeds["ours"], NOTHING, off, goal),
        compare("training_throughput_wandb_in_trainer", unit, speeds["wandb"], NOTHING, off),
        compare("training_throughput_prometheus_in_trainer", unit, speeds["prometheus"], NOTHING, off),
        compare("training_cpu_per_step", "ms", cpu_ms["ours"], NOTHING, cpu_ms["off"]),
        compare("training_cpu_per_step_wandb_in_trainer", "ms", cpu_ms["wandb"], NOTHING, cpu_ms["off"]),
        compare("training_cpu_per_step_prometheus_in_trainer", "ms", cpu_ms["prometheus"], NOTHING, cpu_ms["off"]),
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
        turns = _take_turns(contestants, num_rounds)
    off, ours, wandb = (_speeds(turns[name]) for name in ("off", "ours", "wandb"))
    return [
        compare("hung_server_throughput", "steps/s", ours, NOTHING, off),
        compare("hung_server_throughput_wandb_in_trainer", "steps/s", wandb, NOTHING, off),
    ]


def _take_turns(contestants: Mapping[str, Contestant], num_turns: int) -> dict[str, list[Turn]]:
    """What each contestant did in each of its turns; who begins changes from turn to turn."""
    names = list(contestants)
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for index in range(num_turns):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            turns[name].append(contestants[name].run_for(TURN_S))
        speeds = ", ".join(f"{name} {turns[name][-1].steps_per_second:.2f}" for name in names)
        progress(f"turn {index + 1}/{num_turns}: {speeds} steps/s")
    return turns


def _speeds(turns: Sequence[Turn]) -> list[float]:
    return [turn.steps_per_second for turn in turns]
