"""A real trainer on the small target, as a process that trains for as long as a test wants."""

from pathlib import Path

RUN_ID = "promised"
SETTINGS = {
    "run.id": RUN_ID,
    "target.layer_ids": "[0, 1, 2]",
    "drafter.block_size": 4,
    "train.steps": 1_000_000,
    "train.num_anchors": 4,
    "evaluation.num_prompts": 0,
    "telemetry.interval_s": 0.2,
}


def trainer_arguments(small_target: Path, out_dir: Path, **more: object) -> list[str]:
    """The command line of a run that would last for ever; `more` names settings with `__` for the dot."""
    settings = SETTINGS | {"target.path": small_target, "data.path": small_target / "train.jsonl"}
    return ["-m", "trainer.app", *_assignments(settings, more), "--out", str(out_dir)]


def short_run(small_target: Path, out_dir: Path, *extra: str, **more: object) -> list[str]:
    """What `main` takes for a short run whose queue mixes lengths; `more` as for `trainer_arguments`."""
    settings: dict[str, object] = {
        "target.path": small_target,
        "target.layer_ids": "[0, 1, 2]",
        "data.path": small_target / "train.jsonl",
        "data.num_held_out": 4,
        "drafter.block_size": 4,
        "train.num_anchors": 4,
        "train.learning_rate": 0.003,
        "queue.hs_min_ready": 3,
        "queue.oldest_every": 3,
    }
    return [*_assignments(settings, more), "--out", str(out_dir), *extra]


def _assignments(settings: dict[str, object], more: dict[str, object]) -> list[str]:
    settings = settings | {key.replace("__", "."): value for key, value in more.items()}
    return [f"--set={key}={value}" for key, value in settings.items()]


def last_step(out_dir: Path) -> int:
    """The step of the newest checkpoint: where a run that was stopped has ended."""
    return int((out_dir / "checkpoints/latest").read_text().removeprefix("step-"))
