"""`make gpu-check`: carry out every check, print what was read, write one JSON of figures.

Exit status 0 if nothing failed, 1 if a check failed, 2 if this machine has no GPU to check.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from bench.gpu_check.calibration import Calibration
from bench.gpu_check.gpu_readings import GpuReadings, check_fields
from bench.gpu_check.gpu_tests import check_gpu_tests
from bench.gpu_check.outcome import Check, Document, Figures, Outcome, attempt
from bench.gpu_check.watched_run import WatchedRun
from trainer.gpu_identity import uuid_of

DEFAULT_OUTPUT = Path("gpu-check.json")
EXIT_FAILED = 1
EXIT_NO_GPU = 2
LOAD_S = 10.0
RUN_S = 8.0
TOTAL_S = 230.0
MIN_TESTS_S = 30.0
"""The tests may take what is left of the whole, and so much at least."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = _parser().parse_args(argv)
    # Processes and places are put away on the way out, which SIGTERM would not take by itself.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    missing = None if arguments.rehearse else missing_gpu()
    if missing:
        sys.stderr.write(f"gpu-check: {missing}\n")
        return EXIT_NO_GPU
    start_s = time.monotonic()
    machine, outcomes = _machine(), _run(arguments)
    document = Document(
        passed=all(outcome.outcome != "failed" for outcome in outcomes),
        seconds=round(time.monotonic() - start_s, 1),
        machine=machine,
        checks=tuple(outcomes),
    )
    encoded = msgspec.json.format(msgspec.json.encode(document)) + b"\n"
    print(encoded.decode(), end="", flush=True)
    arguments.output.write_bytes(encoded)
    return 0 if document.passed else EXIT_FAILED


def missing_gpu() -> str | None:
    """What this machine lacks, and None if there is a GPU that torch can use."""
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) has no CUDA; install one that has, on a machine with an NVIDIA GPU"
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU; is the driver loaded (nvidia-smi), and what says CUDA_VISIBLE_DEVICES?"
    return None


def _run(arguments: argparse.Namespace) -> list[Outcome]:
    end_s = time.monotonic() + TOTAL_S
    num_gpus = 0 if arguments.rehearse else torch.cuda.device_count()
    indices = range(num_gpus)
    uuids = [uuid_of(torch.device("cuda", index), torch.cuda, os.environ) for index in indices]
    names = [f"cuda:{index}" for index in indices] or ["cpu"]
    # On one GPU both workers share it; else the second is the drafter's.
    roles = (list(indices[:1]), list(indices[:2][-1:]))
    used = [uuids[index] for index in sorted({*roles[0], *roles[1]})]
    run = WatchedRun(roles, arguments.train or ("--preset", "embedded"), used, arguments.run_s)
    with GpuReadings() as readings:
        calibration = Calibration(readings, names, uuids, arguments.load_s)
        gpu_outcomes = _attempts(
            {
                "nvml_fields": lambda figures: check_fields(readings, figures),
                "load": calibration.check_load,
                "energy_units": calibration.check_energy,
                "throttled_seconds": calibration.check_throttled_seconds,
                "driver_units": calibration.check_driver_units,
            }
        )
        for name, labels, value in readings.newest():
            print(f"  {name}{{{', '.join(f'{key}={text}' for key, text in labels)}}} {value:g}")
    return gpu_outcomes + _attempts(
        {
            "training": run.check_run,
            "synchronisations": run.check_synchronisations,
            "allocator": run.check_allocator,
            "owners": run.check_owners,
            "gpu_tests": lambda figures: check_gpu_tests(
                figures, arguments.tests.split(), max(end_s - time.monotonic(), MIN_TESTS_S)
            ),
        }
    )


def _attempts(checks: dict[str, Check]) -> list[Outcome]:
    outcomes = []
    for name, check in checks.items():
        outcomes.append(attempt(name, check))
        print(outcomes[-1], flush=True)
    return outcomes


def _machine() -> Figures:
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    cuda = torch.version.cuda
    return {"gpus": gpus, "torch": str(torch.__version__), "cuda": cuda, "cpus": len(os.sched_getaffinity(0))}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_check", description="Check what only a machine with an NVIDIA GPU can show."
    )
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, metavar="FILE", help="figures [%(default)s]")
    parser.add_argument(
        "--rehearse", action="store_true", help="go through everything on the CPU, with whatever driver there is"
    )
    parser.add_argument(
        "--train", action="append", metavar="OPTION", help="an option of dflash-train instead of --preset embedded"
    )
    parser.add_argument("--load-s", type=float, default=LOAD_S, metavar="S", help="seconds of load [%(default)g]")
    parser.add_argument("--run-s", type=float, default=RUN_S, metavar="S", help="seconds of training [%(default)g]")
    parser.add_argument("--tests", default="-m gpu", metavar="OPTIONS", help="which tests pytest runs [%(default)s]")
    return parser


if __name__ == "__main__":
    sys.exit(main())
