"""The life of a run: prepare, train, evaluate, save, report.

A run is a directory: `config.json` with every setting, `checkpoints/`, and at the end `drafter/` in the published
format and `report.json`. It exists from the moment its settings are known to be good, so a mistake leaves nothing
behind; what is in it is replaced as a whole or not at all.
"""

import dataclasses
import math
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shared.endpoint import runtime_dir
from trainer.acceptance import EvalReport
from trainer.checkpoint import Checkpoint, CheckpointStore, write_atomically
from trainer.config import TrainerConfig
from trainer.devices import drafter_devices, num_threads, target_devices
from trainer.evaluate import evaluate
from trainer.export import export_drafter
from trainer.instruments import own_thread
from trainer.pipeline import Pipeline
from trainer.prepare import Materials, prepare, tokenizer_digest
from trainer.progress import Progress
from trainer.rank import Rank
from trainer.stopping import Stop, exit_status, stop_on_signals
from trainer.world import World

CONFIG_FILE = "config.json"
REPORT_FILE = "report.json"
TOKENIZER_FILE = "tokenizer.sha256"
EXPORT_DIR = "drafter"
MAX_MESSAGE_CHARS = 1000


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to; `report.json`. Figures of an evaluation that was skipped are null."""

    run_id: str
    session: str
    steps: int
    loss: float | None
    accept_length_simulated: float | None
    accept_length: float | None = None
    lossless: bool | None = None
    speedup: float | None = None
    decode_tokens_per_second: float | None = None
    baseline_tokens_per_second: float | None = None
    tokens_per_second: float
    """Real tokens trained on per second of training."""
    train_seconds: float
    wall_seconds: float
    """From the start of the command to this report."""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What the command line asks for."""

    config: TrainerConfig
    out_dir: Path
    resume: bool
    max_steps: int | None
    environ: Mapping[str, str]
    say: Callable[[str], None]
    rank: Rank

    @property
    def last_step(self) -> int:
        """Where this session ends: the end of the schedule, or before it if that was asked for."""
        return min(self.config.train.steps, self.max_steps or self.config.train.steps)


def run(request: RunRequest, start_s: float) -> tuple[Report | None, int]:
    """Carry out a run; returns its report and the exit status.

    There is no report when a signal ended the run early, after saving, and in all processes but the first.

    Args:
        request: what is to be done.
        start_s: `time.monotonic()` at the start of the command.

    Raises:
        ValueError: something the user can mend.
    """
    config = request.config
    # The main thread's own kernels: a share like any worker's, so that spinning threads never fight for a core.
    drafters = drafter_devices(config)
    own_thread(drafters[0], num_threads(config, request.rank.local_world_size))
    on_gpu = any(device.type == "cuda" for device in drafters)
    materials = prepare(config, request.environ, request.say, target_devices(config))
    world = World.join(request.rank, on_gpu=on_gpu)
    try:
        # Every process has made a name from its own clock, if none was given.
        run_config = msgspec.structs.replace(config.run, id=world.from_lead(config.run.id))
        config = msgspec.structs.replace(config, run=run_config)
        return _live(dataclasses.replace(request, config=config), materials, world, start_s)
    finally:
        world.leave()


def _live(request: RunRequest, materials: Materials, world: World, start_s: float) -> tuple[Report | None, int]:
    stop = Stop()
    pipeline = _build(request, materials, world, stop)
    exit_code = 1
    report = None
    try:
        _open(request, pipeline, materials)
        with stop_on_signals(stop, request.say):
            train_seconds = _train(request, pipeline)
        if stop.signal is not None or pipeline.state.step < request.last_step:
            # Without a signal here, another process of the run got one.
            exit_code = 128 + (stop.signal or signal.SIGTERM)
            request.say(f"saved at step {pipeline.state.step}; continue with --resume --out {request.out_dir}")
            return None, exit_code
        if request.rank.leads:
            report = _report(request, pipeline, materials, (start_s, train_seconds))
        exit_code = 0
    except KeyboardInterrupt as interrupted:
        exit_code = exit_status(interrupted)
        raise
    finally:
        if (error := sys.exception()) is not None:
            pipeline.event("error", message=f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS])
        pipeline.close(exit_code)
    return report, exit_code


def _build(request: RunRequest, materials: Materials, world: World, stop: Stop) -> Pipeline:
    """Everything that can still fail on a user's mistake, before anything is started or written."""
    store = CheckpointStore(request.out_dir, request.config.checkpoint.keep)
    resumed = store.load_latest() if request.resume else None
    if resumed is not None:
        check_same_geometry(resumed, materials)
        check_same_tokenizer(request.out_dir, materials)
        # Without a report the end was interrupted, and what is missing is the evaluation alone.
        if resumed.state.step >= request.last_step and (request.out_dir / REPORT_FILE).exists():
            raise ValueError(
                f"--resume: the run is already at step {resumed.state.step} of {request.last_step}; "
                "measure it again with dflash-eval, or train on with a larger --max-steps or a new run"
            )
    return Pipeline(
        request.config, materials, store, stop=stop, world=world, last_step=request.last_step, resume=resumed
    )


def _open(request: RunRequest, pipeline: Pipeline, materials: Materials) -> None:
    """Start telemetry, then claim the run's directory: a name that is taken must leave nothing behind."""
    telemetry = request.config.telemetry
    if telemetry.enabled:
        path = pipeline.start_telemetry(runtime_dir(request.environ))
        request.say(f"telemetry: {path}, every {telemetry.interval_s:g} s")
    if request.rank.leads:
        _claim_directory(request, materials)


def check_same_geometry(checkpoint: Checkpoint, materials: Materials) -> None:
    """Refuse a checkpoint of another drafter; raises ValueError naming every field that differs."""
    saved, wanted = msgspec.structs.asdict(checkpoint.geometry), msgspec.structs.asdict(materials.geometry)
    differing = [f"{name} {saved[name]} -> {wanted[name]}" for name in saved if saved[name] != wanted[name]]
    if differing:
        raise ValueError(f"--resume: the checkpoint's drafter differs from the settings: {'; '.join(differing)}")


def check_same_tokenizer(run_dir: Path, materials: Materials) -> None:
    """Refuse another tokenizer or chat template than the run began with; raises ValueError."""
    path = run_dir / TOKENIZER_FILE
    # Runs of earlier versions have no such file.
    if path.exists() and path.read_text().strip() != tokenizer_digest(materials.target.tokenizer):
        raise ValueError(
            "--resume: the target's tokenizer or chat template is not the one the run began with, so its samples "
            "would be others; put it back, or start a new run"
        )


def _claim_directory(request: RunRequest, materials: Materials) -> None:
    try:
        request.out_dir.mkdir(parents=True, exist_ok=True)
        encoded = msgspec.json.format(msgspec.json.encode(request.config))
        write_atomically(request.out_dir / CONFIG_FILE, encoded + b"\n")
        digest = tokenizer_digest(materials.target.tokenizer)
        write_atomically(request.out_dir / TOKENIZER_FILE, digest.encode() + b"\n")
    except OSError as error:
        raise ValueError(f"--out {request.out_dir}: {error.strerror}; choose a writable directory") from error


def _report(request: RunRequest, pipeline: Pipeline, materials: Materials, timing: tuple[float, float]) -> Report:
    start_s, train_seconds = timing
    drafter = pipeline.drafter
    exported = request.out_dir / EXPORT_DIR
    # An earlier session of this run may have ended here already, at fewer steps.
    shutil.rmtree(exported, ignore_errors=True)
    export_drafter(drafter.state_dict(), drafter.config, exported)
    evaluation = _evaluate(request, pipeline, materials)
    latest = pipeline.mailbox.latest
    report = Report(
        run_id=request.config.run.id,
        session=pipeline.session,
        steps=pipeline.state.step,
        loss=_finite(latest.loss if latest else None),
        accept_length_simulated=_finite(latest.accept_length_simulated if latest else None),
        accept_length=evaluation.accept_length if evaluation else None,
        lossless=evaluation.lossless if evaluation else None,
        speedup=evaluation.speedup if evaluation else None,
        decode_tokens_per_second=evaluation.tokens_per_second if evaluation else None,
        baseline_tokens_per_second=evaluation.baseline_tokens_per_second if evaluation else None,
        tokens_per_second=pipeline.tokens_trained / train_seconds,
        train_seconds=train_seconds,
        wall_seconds=time.monotonic() - start_s,
    )
    write_atomically(request.out_dir / REPORT_FILE, msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return report


def _train(request: RunRequest, pipeline: Pipeline) -> float:
    """Train to the end or to a stop, with progress; returns the seconds it took."""
    start_s = time.monotonic()
    progress = Progress(pipeline.state.step, request.last_step)

    def show(*, force: bool = False) -> None:
        latest = pipeline.mailbox.latest
        if latest is not None and request.rank.leads:
            figures = (latest.loss, latest.accept_length_simulated)
            progress.show(latest.step, figures, pipeline.tokens_trained, pipeline.queue.statistics(), force=force)

    try:
        pipeline.train(show)
        show(force=True)
    finally:
        progress.close()
    return time.monotonic() - start_s


def _evaluate(request: RunRequest, pipeline: Pipeline, materials: Materials) -> EvalReport | None:
    if not request.config.evaluation.num_prompts:
        return None
    request.say(f"evaluating {request.config.evaluation.num_prompts} held-out prompts, with and without the drafter")
    report = evaluate(pipeline.drafter, materials, request.config)
    if report is not None:
        pipeline.event(
            "evaluation",
            step=pipeline.state.step,
            accept_length=report.accept_length,
            lossless=report.lossless,
            speedup=report.speedup,
            tokens_per_second=report.tokens_per_second,
        )
    return report


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
