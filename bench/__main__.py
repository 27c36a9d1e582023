"""`make bench`: run the benchmarks, print a table, write `bench/results.json`.

A run of some of them (`--only`) prints its table and leaves the file of the last whole run alone, unless `--output`
names a file.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.drafter_step import drafter_step
from bench.engine import definitions
from bench.hung_server import hung_server_exit, hung_server_first_step
from bench.ingestion import catch_up, ingest_64_trainers, ingest_frames
from bench.machine import MAX_OTHER_LOAD_CORES, description, disturbance, other_load_cores
from bench.publishing import publish_500_series, stall
from bench.results import Result, number, table, write
from bench.scraping import scrape
from bench.training import hung_server_throughput, training_throughput
from bench.updates import counter_update
from bench.workplace import BenchmarkError

DEFAULT_OUTPUT = Path(__file__).parent / "results.json"
DEFAULT_ROUNDS = 5
BENCHMARKS: dict[str, Callable[[int], list[Result]]] = {
    "counter_update": counter_update,
    "publish_500_series": publish_500_series,
    "training_stall": stall,
    "ingest_frames": ingest_frames,
    "catch_up": catch_up,
    "ingest_64_trainers": ingest_64_trainers,
    "definitions": definitions,
    "scrape": scrape,
    "training_throughput": training_throughput,
    "drafter_step": drafter_step,
    "hung_server_throughput": hung_server_throughput,
    "hung_server_first_step": hung_server_first_step,
    "hung_server_exit": hung_server_exit,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 also when a goal is missed, because figures are what was asked for."""
    arguments = _parser().parse_args(argv)
    chosen = {name: run for name, run in BENCHMARKS.items() if _is_chosen(name, arguments.only)}
    if not chosen or arguments.rounds < 1:
        sys.stderr.write(f"bench: nothing to do; --only takes part of {', '.join(BENCHMARKS)}; --rounds at least 1\n")
        return 2
    # Places and processes are put away on the way out, which SIGTERM would not take by itself.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    # wandb's own lines would stand between ours.
    os.environ |= {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    try:
        results = _run(chosen, arguments.rounds)
    except BenchmarkError as error:
        sys.stderr.write(f"bench: {error}\n")
        return 1
    _say(table(results))
    if not results[0].goal_met:
        _say(f"something else used {results[0].value:.2f} cores: run it again on a quiet machine")
    output = arguments.output or (DEFAULT_OUTPUT if chosen == BENCHMARKS else None)
    if output is not None:
        write(results, output)
        _say(f"written to {output}")
    return 0


def _run(chosen: dict[str, Callable[[int], list[Result]]], num_rounds: int) -> list[Result]:
    _say(description())
    start_s, loads_cores, results = time.monotonic(), list[float](), list[Result]()
    for index, (name, run) in enumerate(chosen.items(), start=1):
        loads_cores.append(other_load_cores())
        busy = f", but others use {loads_cores[-1]:.2f} cores" if loads_cores[-1] > MAX_OTHER_LOAD_CORES else ""
        _say(f"[{index}/{len(chosen)}, {time.monotonic() - start_s:.0f} s] {name}{busy}")
        found = run(num_rounds)
        for result in found:
            _say(f"  {result.name}: {number(result.value)} {result.unit}")
        results += found
    return [disturbance(loads_cores), *results]


def _is_chosen(name: str, parts: Sequence[str]) -> bool:
    return not parts or any(part in name for part in parts)


def _say(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure what telemetry and training cost, side by side with what one would otherwise do.",
        epilog=f"benchmarks: {', '.join(BENCHMARKS)}",
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="PART", help="run those whose name has this in it; repeatable"
    )
    parser.add_argument("--rounds", type=int, default=DEFAULT_ROUNDS, metavar="N", help="rounds of each [%(default)s]")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the results [bench/results.json]")
    return parser


if __name__ == "__main__":
    sys.exit(main())
