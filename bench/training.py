"""Training throughput under each way to watch it: nothing, ours, and what one would otherwise put into the loop.

Every contestant is a real run of the embedded preset, with its sidecar, scraper and whatever it starts itself. They are
started one after the other, trained past the cost of starting, and stopped with SIGSTOP. Then they take turns of a few
seconds: one contestant runs with the whole machine to itself, the others stand still. So a round is short, and what
slows the machine for longer than that slows all of them. A step that a stop fell into is not counted.

Timers go on while a contestant stands still, so what it does every 5 or 15 seconds comes due in almost every turn:
telemetry and its peers are charged more for it here than in a run without stops.
"""

import os
import socket
from collections.abc import Callable, Mapping

from bench.contestants import Contestant
from bench.results import Goal, Result, compare
from bench.workplace import WandbServer, Workplace, progress
from trainer.embedded_target import default_cache_dir, embedded_target

TURN_S = 3.0
TURNS_PER_ROUND = 3
HUNG_TURNS_PER_ROUND = 2
WARM_UP_STEPS = 60
HANG_STEP = 20
"""The stand-in server hangs from here on, well before the measured steps."""
INIT_TIMEOUT_S = 10.0
"""How long `wandb.init` may block; its own default is 90 s."""
MAX_STARTS = 3
SCRAPE_INTERVAL_S = 1.0
SETTINGS = {
    "run.id": "bench",
    "evaluation.num_prompts": 0,
    # About ten steps a second on two cores, so that a turn has many.
    "train.batch_size": 4,
    "train.steps": 100_000,
    "checkpoint.every_steps": 100_000,
}
MIN_RATIO = 0.99


def training_throughput(num_rounds: int) -> list[Result]:
    """Steps per second with telemetry and a live sidecar, and with two instrumented loops, against neither."""
    _make_target()
    with Workplace() as place:
        contestants = {
            "off": _trainer(place, "off", "none"),
            "ours": _with_sidecar(place, "ours", place.wandb_server()),
            "wandb": _trainer(place, "wandb", "wandb", place.wandb_server().environ),
            "prometheus": _with_prometheus(place),
        }
        speeds = _take_turns(contestants, num_rounds * TURNS_PER_ROUND)
    goal, unit, nothing = Goal("ratio", ">=", MIN_RATIO), "steps/s", "no telemetry, no sidecar"
    return [
        compare("training_throughput", unit, speeds["ours"], nothing, speeds["off"], goal),
        compare("training_throughput_wandb_in_trainer", unit, speeds["wandb"], nothing, speeds["off"]),
        compare("training_throughput_prometheus_in_trainer", unit, speeds["prometheus"], nothing, speeds["off"]),
        compare("training_throughput_beside_wandb", unit, speeds["ours"], "wandb.log in the trainer", speeds["wandb"]),
    ]


def hung_server_throughput(num_rounds: int) -> list[Result]:
    """Steps per second when the W&B server takes requests and never answers, against no telemetry at all.

    For our sidecar it hangs from the start; `wandb.log` in the trainer would not begin, so there it hangs later.
    """
    _make_target()
    with Workplace() as place:
        server = place.wandb_server()
        hang = {"BENCH_HANG_STEP": str(HANG_STEP), "BENCH_SERVER_PID": str(server.pid)}
        contestants = {
            "off": _trainer(place, "off", "none"),
            "ours": _with_sidecar(place, "ours", place.wandb_server(hung=True)),
            "wandb": _trainer(place, "wandb", "wandb", {**server.environ, **hang}),
        }
        speeds = _take_turns(contestants, num_rounds * HUNG_TURNS_PER_ROUND)
    nothing = "no telemetry, no sidecar"
    return [
        compare("hung_server_throughput", "steps/s", speeds["ours"], nothing, speeds["off"]),
        compare("hung_server_throughput_wandb_in_trainer", "steps/s", speeds["wandb"], nothing, speeds["off"]),
    ]


def hung_server_first_step(num_rounds: int) -> list[Result]:
    """Seconds from the start of a trainer to its first step when the W&B server never answers."""
    _make_target()
    bounded = {"BENCH_INIT_TIMEOUT_S": str(INIT_TIMEOUT_S)}
    starts: dict[str, Callable[[Workplace], Contestant]] = {
        "ours": lambda place: _with_sidecar(place, "ours", place.wandb_server(hung=True), steps=1),
        "wandb": lambda place: _trainer(
            place, "wandb", "wandb", {**place.wandb_server(hung=True).environ, **bounded}, steps=1
        ),
    }
    waits_s: dict[str, list[float]] = {name: [] for name in starts}
    for _ in range(min(num_rounds, MAX_STARTS)):
        for name, start in starts.items():
            with Workplace() as place:
                waits_s[name].append(start(place).first_step_s)
    peer = f"wandb.init in the trainer, timeout {INIT_TIMEOUT_S:g} s instead of 90 s"
    return [compare("hung_server_first_step", "s", waits_s["ours"], peer, waits_s["wandb"])]


def _with_sidecar(place: Workplace, name: str, server: WandbServer, steps: int = WARM_UP_STEPS) -> Contestant:
    sidecar = place.sidecar(environ=server.environ)
    scraper = place.popen(("-m", "bench.scraper", sidecar.url, "/metrics", str(SCRAPE_INTERVAL_S), "0"))
    contestant = Contestant(place, name, (sidecar.process, scraper))
    contestant.start("none", _arguments(place, name, telemetry="on"), steps=steps)
    return contestant


def _with_prometheus(place: Workplace) -> Contestant:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    scraper = place.popen(("-m", "bench.scraper", url, "/metrics", str(SCRAPE_INTERVAL_S), "0"))
    contestant = Contestant(place, "prometheus", (scraper,))
    environ = {"BENCH_PROMETHEUS_PORT": str(port)}
    contestant.start("prometheus", _arguments(place, "prometheus"), environ, steps=WARM_UP_STEPS)
    return contestant


def _trainer(
    place: Workplace, name: str, kind: str, environ: Mapping[str, str] | None = None, steps: int = WARM_UP_STEPS
) -> Contestant:
    contestant = Contestant(place, name)
    contestant.start(kind, _arguments(place, name), environ, steps=steps)
    return contestant


def _arguments(place: Workplace, name: str, telemetry: str = "off") -> list[str]:
    settings = [f"--set={key}={value}" for key, value in SETTINGS.items()]
    return ["--preset", "embedded", *settings, "--out", str(place.path / f"run-{name}"), "--telemetry", telemetry]


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


def _make_target() -> None:
    """Build the preset's target now if it is not cached, so that no run does it while it is measured."""
    embedded_target(default_cache_dir(os.environ), on_progress=progress)
