"""The `dflash-train` command: train a drafter, list presets, let a target answer prompts.

Every mistake a user can make ends in one line with the remedy and exit status 2; a failure while training keeps its
traceback and ends in 1; a run ended by a signal saves, and ends in 128 plus the signal's number.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, MutableMapping, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from shared.settings import SettingsError, settings_of
from trainer.config import TrainerConfig, load_config, preset_description, preset_names, with_batches_per_step
from trainer.rank import Rank
from trainer.stopping import exit_status, interrupt

DEFAULT_PRESET = "embedded"
EXIT_USER_ERROR = 2
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Names of the same setting of torch, which warns of the older one."""
ALLOCATOR_SETTING = "expandable_segments:True"
"""Sequences of many lengths would leave holes that nothing fits into."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    start_s = time.monotonic()
    arguments = _parser().parse_args(argv)
    # Outside of training, where both mean "save and leave", SIGTERM ends the command the way Ctrl-C does.
    previous = signal.signal(signal.SIGTERM, interrupt)
    prepare_allocator(os.environ)
    try:
        command: Callable[[argparse.Namespace, float], int] = arguments.command
        return command(arguments, start_s)
    except ValueError as error:
        if os.environ.get("DFLASH_TRACEBACK"):
            raise
        print(f"dflash-train: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt as interrupted:
        print("dflash-train: interrupted", file=sys.stderr)
        return exit_status(interrupted)
    finally:
        signal.signal(signal.SIGTERM, previous)


def prepare_allocator(environ: MutableMapping[str, str]) -> None:
    """Choose how CUDA's allocator grows unless the user did; only before torch is loaded, which looks once."""
    if not any(name in environ for name in ALLOCATOR_VARIABLES):
        environ[ALLOCATOR_VARIABLES[0]] = ALLOCATOR_SETTING


def _train(arguments: argparse.Namespace, start_s: float) -> int:
    config, out_dir = _resolve(arguments)
    # Imported here: torch takes seconds to load, and a mistyped key should not wait for it.
    from trainer.run import RunRequest, run  # noqa: PLC0415

    rank = Rank.from_environ(os.environ)
    say = _say if rank.leads else _say_nothing
    say(f"run {config.run.id} in {out_dir}, process {os.getpid()}")
    request = RunRequest(
        config=config,
        out_dir=out_dir,
        resume=arguments.resume,
        max_steps=arguments.max_steps,
        environ=os.environ,
        say=say,
        rank=rank,
    )
    report, exit_code = run(request, start_s)
    if report is None:
        return exit_code
    _say(msgspec.json.format(msgspec.json.encode(report)).decode())
    return 0


def _regenerate(arguments: argparse.Namespace, _start_s: float) -> int:
    config = load_config(preset=_preset(arguments), assignments=arguments.set, environ=os.environ)
    from trainer.devices import target_devices  # noqa: PLC0415
    from trainer.prepare import load_target, target_path  # noqa: PLC0415
    from trainer.regenerate import read_prompts, regenerate  # noqa: PLC0415

    prompts = read_prompts(arguments.prompts)
    target = load_target(config, target_path(config, os.environ, _say), target_devices(config)[0])
    report = regenerate(
        target,
        prompts,
        arguments.answers,
        max_new_tokens=arguments.max_new_tokens,
        batch_size=arguments.batch_size,
        on_progress=lambda done, total: _say(f"{done}/{total} prompts answered"),
    )
    skipped = "".join(f", {count} skipped: {reason}" for reason, count in sorted(report.skipped.items()))
    _say(f"{report.num_written} conversations in {arguments.answers}{skipped}")
    return 0


def _presets(_arguments: argparse.Namespace, _start_s: float) -> int:
    for name in preset_names():
        print(f"{name:12} {preset_description(name)}")
    return 0


def _resolve(arguments: argparse.Namespace) -> tuple[TrainerConfig, Path]:
    config, out_dir = _asked_for(arguments)
    return with_batches_per_step(config, Rank.from_environ(os.environ).world_size), out_dir


def _asked_for(arguments: argparse.Namespace) -> tuple[TrainerConfig, Path]:
    assignments = list(arguments.set)
    if arguments.telemetry is not None:
        assignments.append(f"telemetry.enabled={'true' if arguments.telemetry == 'on' else 'false'}")
    if arguments.max_steps is not None and arguments.max_steps < 1:
        raise SettingsError(f"--max-steps {arguments.max_steps}: must be at least 1")
    out_dir: Path | None = arguments.out
    if arguments.resume:
        if arguments.preset is not None:
            raise SettingsError("--resume: a run keeps its settings; leave --preset out")
        out_dir = out_dir or _newest_run(Path("runs"))
        saved = out_dir / "config.json"
        config = load_config(preset=None, assignments=assignments, environ=os.environ, saved=saved)
        _check_resumable(load_config(preset=None, assignments=[], environ={}, saved=saved), config)
        return config, out_dir
    preset = _preset(arguments)
    config = load_config(preset=preset, assignments=assignments, environ=os.environ)
    if not config.run.id:
        made = f"{preset or 'drafter'}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"
        config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, id=made))
    out_dir = out_dir or Path("runs") / config.run.id
    if (out_dir / "config.json").exists():
        raise SettingsError(f"{out_dir} already holds a run; continue it with --resume or choose another --out")
    return config, out_dir


def _preset(arguments: argparse.Namespace) -> str | None:
    """The preset that applies: the one named; without a name the default one, unless the user brings a target.

    The default preset's sizes fit its own tiny target and would be silently wrong for any other.
    """
    if arguments.preset is not None:
        return str(arguments.preset)
    asked = load_config(preset=None, assignments=arguments.set, environ=os.environ)
    return DEFAULT_PRESET if asked.target.path == TrainerConfig().target.path else None


def _newest_run(runs: Path) -> Path:
    found = sorted(runs.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SettingsError(f"--resume: no run in {runs.absolute()}; name its directory with --out")
    return found[-1].parent


def _check_resumable(saved: TrainerConfig, wanted: TrainerConfig) -> None:
    """Refuse changes that would make the data cursor or the schedule mean something else."""
    free = ("telemetry.", "evaluation.", "checkpoint.", "devices.", "queue.max_", "queue.prefetch")
    before, after = saved.flat(), wanted.flat()
    changed = [key for key, value in before.items() if after[key] != value and not key.startswith(free)]
    if changed:
        raise SettingsError(
            f"--resume: {', '.join(changed)} cannot change in a run that has begun; start a new run for that"
        )


def _say(line: str) -> None:
    print(line, flush=True)


def _say_nothing(_line: str) -> None:
    pass


def _settings_table() -> str:
    rows = [f"  {s.key:30} {s.description} [{s.default!r}]" for s in settings_of(TrainerConfig)]
    return "settings for --set KEY=VALUE, or DFLASH_SECTION_KEY in the environment:\n" + "\n".join(rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dflash-train",
        description="Train a DFlash drafter against a frozen target, publishing telemetry for a sidecar.",
        epilog=_settings_table(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=_train)
    parser.add_argument(
        "--preset", help=f"one of {', '.join(preset_names())} [{DEFAULT_PRESET}, or none where target.path is set]"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting; repeatable")
    parser.add_argument("--max-steps", type=int, metavar="N", help="stop after step N; the schedule stays as it is")
    parser.add_argument("--out", type=Path, metavar="DIR", help="directory of the run [runs/RUN_ID]")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out, or the newest one in runs/")
    parser.add_argument("--telemetry", choices=("on", "off"), help="same as --set telemetry.enabled=...")
    commands = parser.add_subparsers(title="other commands", metavar="COMMAND")
    presets = commands.add_parser("presets", help="list the presets")
    presets.set_defaults(command=_presets)
    _add_regenerate(commands)
    return parser


def _add_regenerate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("regenerate", help="let the target answer prompts, as data to train on")
    parser.set_defaults(command=_regenerate)
    parser.add_argument("prompts", type=Path, help="one prompt a line, or JSONL with prompt or conversations")
    parser.add_argument("answers", type=Path, help="JSONL file to write, for data.path")
    # Given after the command as well as before it.
    parser.add_argument("--preset", default=argparse.SUPPRESS, help="names the target")
    parser.add_argument(
        "--set", action="append", default=argparse.SUPPRESS, metavar="KEY=VALUE", help="change a setting"
    )
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="longest answer [%(default)s]")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="prompts at a time [%(default)s]")


if __name__ == "__main__":
    sys.exit(main())
