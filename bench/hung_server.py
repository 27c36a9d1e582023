"""What a W&B server that takes requests and never answers costs a trainer at its start and at its end."""

from collections.abc import Callable

from bench.contestants import Contestant
from bench.results import Result, compare
from bench.watched_runs import HANG_STEP, beside_sidecar, make_target, with_wandb, with_wandb_that_hangs
from bench.workplace import Workplace

INIT_TIMEOUT_S = 10.0
"""How long `wandb.init` may block; its own default is 90 s."""
EXIT_TIMEOUT_S = 15.0
"""A trainer that has not ended by then counts with this time."""
MAX_ROUNDS = 2
"""Waiting for timeouts takes long and varies little."""


def hung_server_first_step(num_rounds: int) -> list[Result]:
    """Seconds from the start of a trainer to the end of its first step."""
    peer = f"wandb.init in the trainer, timeout {INIT_TIMEOUT_S:g} s instead of 90 s"
    bound = str(INIT_TIMEOUT_S)
    ours, theirs = _seconds(
        num_rounds,
        lambda place: beside_sidecar(place, place.wandb_server(hung=True), steps=1),
        lambda place: with_wandb(place, place.wandb_server(hung=True), steps=1, BENCH_INIT_TIMEOUT_S=bound),
        lambda contestant: contestant.first_step_s,
    )
    return [compare("hung_server_first_step", "s", ours, peer, theirs)]


def hung_server_exit(num_rounds: int) -> list[Result]:
    """Seconds from SIGTERM, as a scheduler sends it, to the end of a trainer that saves and leaves."""
    peer = f"wandb.log in the trainer, killed after {EXIT_TIMEOUT_S:g} s"
    ours, theirs = _seconds(
        num_rounds,
        lambda place: beside_sidecar(place, place.wandb_server(hung=True), steps=2 * HANG_STEP),
        lambda place: with_wandb_that_hangs(place, steps=2 * HANG_STEP),
        lambda contestant: contestant.terminate(EXIT_TIMEOUT_S),
    )
    return [compare("hung_server_exit", "s", ours, peer, theirs)]


def _seconds(
    num_rounds: int,
    ours: Callable[[Workplace], Contestant],
    theirs: Callable[[Workplace], Contestant],
    measure: Callable[[Contestant], float],
) -> tuple[list[float], list[float]]:
    """Start ours and theirs in turn, each in a place of its own, and measure something on them."""
    make_target()
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(min(num_rounds, MAX_ROUNDS)):
        for start, seconds in zip((ours, theirs), found, strict=True):
            with Workplace() as place:
                seconds.append(measure(start(place)))
    return found
