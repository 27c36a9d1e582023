"""The `dflash-eval` command: what a checkpoint is worth, by real speculative decoding on held-out prompts.

Everything besides the checkpoint comes from the `config.json` of its run, so unless a file of prompts is given they are
the ones that were held back when it was trained.
"""

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import msgspec
import torch

from trainer.acceptance import EvalReport, evaluate_drafter
from trainer.checkpoint import write_atomically
from trainer.config import TrainerConfig, load_config
from trainer.data import ConversationRenderer
from trainer.drafter import Drafter
from trainer.export import load_checkpoint
from trainer.prepare import Materials, prepare
from trainer.regenerate import read_prompts
from trainer.sampling import Sampler
from trainer.speculate import speculate
from trainer.target import Target

EXIT_USER_ERROR = 2
NUM_TIMED_TOKENS = 8


def evaluate(
    drafter: Drafter, materials: Materials, config: TrainerConfig, sampler: Sampler | None = None
) -> EvalReport | None:
    """Decode the held-out prompts with and without the drafter; None when the settings ask for no prompts."""
    prompts = materials.prompts[: config.evaluation.num_prompts]
    if not prompts:
        return None
    # In fp32: in bf16 one token at a time and a block at a time round differently, and near-ties flip.
    model = materials.target.model.float()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    drafter = drafter.to(model.device).float()
    on_cpu = model.device.type == "cpu"
    with quickest_threads(lambda: speculate(drafter, model, prompts[0], NUM_TIMED_TOKENS)) if on_cpu else nullcontext():
        return evaluate_drafter(
            drafter, model, prompts, config.evaluation.max_new_tokens, materials.target.eos_token_ids, sampler
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


def prompts_of(path: Path, target: Target, max_new_tokens: int) -> list[list[int]]:
    """The first question of every line of a file, as token ids.

    Raises:
        ValueError: The file cannot be read, or a line has no question, is refused by the template or is too long.
    """
    renderer = ConversationRenderer(target.tokenizer, target.eos_token_ids)
    prompts = []
    for number, messages in enumerate(read_prompts(path), start=1):
        users = [index for index, message in enumerate(messages) if message.role == "user"]
        if not users:
            raise ValueError(f"prompts {path}: prompt {number} has no user's turn; remove it")
        prompt_ids = renderer.prompt_ids(messages[: users[0] + 1])
        if target.max_positions is not None and len(prompt_ids) + max_new_tokens > target.max_positions:
            raise ValueError(
                f"prompts {path}: prompt {number} has {len(prompt_ids)} tokens, which with {max_new_tokens} new ones "
                f"exceeds the target's {target.max_positions}; shorten it or lower evaluation.max_new_tokens"
            )
        prompts.append(prompt_ids)
    return prompts


def find_run(path: Path) -> Path:
    """The run directory that a path is, or lies in; raises ValueError."""
    for candidate in (path, *path.absolute().parents):
        if (candidate / "config.json").is_file() and (candidate / "checkpoints").is_dir():
            return candidate
    raise ValueError(f"{path}: neither a run directory nor a checkpoint in one; give DIR of 'dflash-train --out DIR'")


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        report = _measure(arguments)
        encoded = msgspec.json.format(msgspec.json.encode(dataclasses.asdict(report) if report else None)) + b"\n"
        if arguments.json is not None:
            write_atomically(arguments.json, encoded)
    except OSError as error:
        parser.exit(EXIT_USER_ERROR, f"dflash-eval: --json {arguments.json}: {error.strerror}; choose another file\n")
    except ValueError as error:
        parser.exit(EXIT_USER_ERROR, f"dflash-eval: {error}\n")
    sys.stdout.write(encoded.decode())
    return 0


def _measure(arguments: argparse.Namespace) -> EvalReport | None:
    sampler = Sampler(arguments.temperature, top_p=arguments.top_p, top_k=arguments.top_k, seed=arguments.seed)
    if arguments.json is not None and not arguments.json.parent.is_dir():
        # Said now, as a long evaluation would be lost.
        raise ValueError(f"--json {arguments.json}: no such directory; choose one that exists")
    run_dir = find_run(arguments.path)
    config = load_config(preset="", assignments=arguments.set, environ=os.environ, saved=run_dir / "config.json")
    drafter = load_checkpoint(arguments.path)
    materials = prepare(config, os.environ, _say, [torch.device("cpu")])
    if arguments.prompts is not None:
        prompts = prompts_of(arguments.prompts, materials.target, config.evaluation.max_new_tokens)
        materials = dataclasses.replace(materials, prompts=prompts)
        # All of the file, however many of the held-out ones the run was to decode.
        evaluation = msgspec.structs.replace(config.evaluation, num_prompts=len(prompts))
        config = msgspec.structs.replace(config, evaluation=evaluation)
    return evaluate(drafter, materials, config, sampler)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dflash-eval", description="Measure a checkpoint by speculative decoding.")
    parser.add_argument("path", type=Path, help="a run directory, for its newest checkpoint, or one checkpoint in it")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting; repeatable")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="one prompt a line, or JSONL with prompt or conversations [held-out]",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token [%(default)s]")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="draw from this probability [%(default)s]"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="draw from K tokens; 0 from all [%(default)s]"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn [%(default)s]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report into this file as well")
    return parser
