"""The `dflash-eval` command: what a checkpoint is worth, by real speculative decoding on held-out prompts.

Everything besides the checkpoint comes from the `config.json` of its run, so the prompts are the ones that were held
back when it was trained.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import msgspec
import torch

from trainer.acceptance import EvalReport, evaluate_drafter
from trainer.config import TrainerConfig, load_config
from trainer.drafter import Drafter
from trainer.export import load_checkpoint
from trainer.prepare import Materials, prepare
from trainer.speculate import speculate

EXIT_USER_ERROR = 2
NUM_TIMED_TOKENS = 8


def evaluate(drafter: Drafter, materials: Materials, config: TrainerConfig) -> EvalReport | None:
    """Decode the held-out prompts with and without the drafter; None when the settings ask for no prompts."""
    prompts = materials.prompts[: config.evaluation.num_prompts]
    if not prompts:
        return None
    # In fp32: in bf16 one token at a time and a block at a time round differently, and near-ties flip.
    model = materials.target.model.float()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    drafter = drafter.to(model.device).float()
    with quickest_threads(lambda: speculate(drafter, model, prompts[0], NUM_TIMED_TOKENS)):
        return evaluate_drafter(
            drafter, model, prompts, config.evaluation.max_new_tokens, materials.target.eos_token_ids
        )


@contextmanager
def quickest_threads(work: Callable[[], object]) -> Iterator[None]:
    """Use as many CPU threads as did `work` soonest: 1, 2, 4 and so on up to all there are.

    The kernels of a small model are over sooner than threads can meet, and on a machine with other load they wait for
    each other most of the time.
    """
    before = torch.get_num_threads()
    seconds: dict[int, float] = {}
    try:
        for num_threads in sorted({before, *(2**power for power in range(before.bit_length()))}):
            torch.set_num_threads(num_threads)
            work()  # the first time also starts the threads
            begin = time.perf_counter()
            work()
            seconds[num_threads] = time.perf_counter() - begin
        torch.set_num_threads(min(seconds, key=seconds.__getitem__))
        yield
    finally:
        torch.set_num_threads(before)


def find_run(path: Path) -> Path:
    """The run directory that a path is, or lies in; raises ValueError."""
    for candidate in (path, *path.absolute().parents):
        if (candidate / "config.json").is_file() and (candidate / "checkpoints").is_dir():
            return candidate
    raise ValueError(f"{path}: neither a run directory nor a checkpoint in one; give DIR of 'dflash-train --out DIR'")


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="dflash-eval", description="Measure a checkpoint by speculative decoding.")
    parser.add_argument("path", type=Path, help="a run directory, for its newest checkpoint, or one checkpoint in it")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting; repeatable")
    arguments = parser.parse_args()
    try:
        run_dir = find_run(arguments.path)
        config = load_config(preset="", assignments=arguments.set, environ=os.environ, saved=run_dir / "config.json")
        drafter = load_checkpoint(arguments.path)
        materials = prepare(config, os.environ, _say, [torch.device("cpu")])
        report = evaluate(drafter, materials, config)
    except ValueError as error:
        parser.exit(EXIT_USER_ERROR, f"dflash-eval: {error}\n")
    document = asdict(report) if report else None
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document)).decode() + "\n")
    return 0
