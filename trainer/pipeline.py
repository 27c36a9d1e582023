"""The machine of one run: target worker, queue, drafter worker, and what they report, wired together.

Building it starts nothing. `train` runs the threads until the last step, a stop or a failure; the telemetry publisher
runs beside them and outlives them until `close`, so that the evaluation still reaches a sidecar.
"""

import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import torch

from shared.catalogue import TRAINER_FAMILIES
from shared.cells import Cells
from shared.curve import CurveServer
from shared.endpoint import EndpointClaim, socket_path
from shared.publisher import Identity, Publisher
from shared.redaction import without_secrets
from shared.wire import Device, Scalar, Step
from trainer.allocator_metrics import AllocatorMetrics
from trainer.audit import AuditTrail
from trainer.batches import Batches
from trainer.checkpoint import Checkpoint, CheckpointStore
from trainer.config import TrainerConfig
from trainer.drafter import Drafter
from trainer.drafter_worker import TORCH_DTYPES, Borrowed, DrafterWorker, StepPlan
from trainer.gpu_identity import uuid_of
from trainer.hidden_queue import HiddenQueue
from trainer.instruments import StepMailbox, own_gpu
from trainer.prepare import Materials
from trainer.pulled_metrics import QueueMetrics, RingMetrics
from trainer.supervisor import Stop, Supervisor
from trainer.target_worker import HiddenBatch, TargetWorker

NUM_WORKERS = 2
SKIP_REASONS = ("unsupervised", "truncated")


class Pipeline:
    """Everything that lives while a run trains.

    Args:
        config: settings of the run, `run.id` filled in.
        materials: target, samples and geometry.
        store: where checkpoints go.
        stop: the run's stop flag.
        last_step: where this session ends.
        resume: continue from this checkpoint.
    """

    def __init__(
        self,
        config: TrainerConfig,
        materials: Materials,
        store: CheckpointStore,
        stop: Stop,
        *,
        last_step: int,
        resume: Checkpoint | None,
    ) -> None:
        self.config = config
        self.session = uuid.uuid4().hex[:12]
        self.publisher: Publisher | None = None
        self._materials = materials
        self._store = store
        self._stop = stop
        self._cells = Cells(TRAINER_FAMILIES)
        self._cleanup = ExitStack()
        self.mailbox = StepMailbox(
            skipped=self._cells.counter("dflash_samples_skipped_total", reason="nonfinite_gradient"),
            dropped=self._cells.counter("dflash_telemetry_dropped_steps_total"),
        )
        self._count_skipped(materials.skipped)
        taken = resume.state.cursor.num_taken if resume else 0
        self.queue: HiddenQueue[HiddenBatch] = HiddenQueue(
            max_bytes=config.queue.max_bytes,
            max_items=config.queue.max_items,
            hs_min_ready=config.queue.hs_min_ready,
            oldest_every=config.queue.oldest_every,
            takes=taken,
        )
        self.drafter_worker = self._make_drafter_worker(last_step)
        if resume is not None:
            self.drafter_worker.restore(resume)
        self._target_worker = self._make_target_worker()
        devices = {materials.target.device, self._drafter_device}
        self._queue_metrics = QueueMetrics(self._cells, "hidden", self.queue.statistics)
        self._allocator_metrics = AllocatorMetrics(
            self._cells, devices, torch.cuda, config.telemetry.allocator_interval_s
        )
        self._ring_metrics = RingMetrics(self._cells)
        self._telemetry_owns_gpu = False

    def start_telemetry(self, directory: Path) -> Path | str:
        """Claim the endpoint and start publishing; raises EndpointError or CurveError when it is taken or cannot be."""
        telemetry = self.config.telemetry
        path = curve = None
        if telemetry.endpoint:
            curve = CurveServer(telemetry.endpoint, Path(telemetry.keys))
        else:
            path = socket_path(directory, self.config.run.id, 0)
            self._cleanup.enter_context(EndpointClaim(path))
        target_device, drafter_device = self._materials.target.device, self._drafter_device
        self.publisher = Publisher(
            cells=self._cells,
            identity=Identity(
                run_id=self.config.run.id,
                session=self.session,
                pid=os.getpid(),
                start_time_s=time.time(),
                topology=(
                    Device("target", "0", str(target_device), _uuid(target_device)),
                    Device("drafter", "0", str(drafter_device), _uuid(drafter_device)),
                ),
                # Where it writes: the sidecar watches the space that is left there.
                config={**without_secrets(self.config.flat()), "run.out_dir": str(self._store.run_dir.absolute())},
            ),
            path=path,
            curve=curve,
            interval_s=telemetry.interval_s,
            ring_bytes=telemetry.ring_bytes,
            linger_s=telemetry.linger_s,
            on_tick=self._pull,
            collect=self.mailbox.collect,
            audit=AuditTrail(Path(telemetry.audit_path)).write if telemetry.audit_path else None,
        )
        self.publisher.start()
        return path or telemetry.endpoint

    def train(self, watch: Callable[[], None]) -> None:
        """Run the workers to the end, calling `watch` regularly; raises what the first failing worker raised."""

        def collect_and_watch() -> None:
            if self.publisher is None:
                _drain(self.mailbox.collect())
            watch()

        workers = {"target-0": self._target_worker.run, "drafter-0": self.drafter_worker.run}
        Supervisor(self._stop, self.queue.abort).run(workers, collect_and_watch)
        # The last steps are on their way through the mailbox; the report is to be about the last one.
        deadline_s = time.monotonic() + self.config.telemetry.interval_s + 1.0
        while self.mailbox.num_pending and time.monotonic() < deadline_s:
            time.sleep(0.01)
        watch()

    def event(self, kind: str, **detail: Scalar) -> None:
        """Report something that happened, if anybody listens."""
        if self.publisher is not None:
            self.publisher.event(kind, **detail)

    def close(self, exit_code: int) -> None:
        """Say goodbye and give the endpoint back."""
        self._allocator_metrics.expire()
        if self.publisher is not None:
            self.publisher.close(exit_code)
        self._cleanup.close()

    @property
    def tokens_trained(self) -> float:
        """Real tokens the drafter has learned from in this session."""
        return self.drafter_worker.num_tokens_real

    @property
    def _drafter_device(self) -> torch.device:
        return device_of(self.config.devices.drafters)

    def _make_drafter_worker(self, last_step: int) -> DrafterWorker:
        config, target, device = self.config, self._materials.target, self._drafter_device
        generator = torch.Generator().manual_seed(config.train.seed)
        drafter = Drafter(self._materials.geometry, generator).to(device)
        compute_dtype = TORCH_DTYPES[config.train.dtype]
        borrowed = Borrowed(
            embedding_weight=target.embedding_weight.detach().to(device, compute_dtype),
            head_weight=target.head_weight.detach().to(device, compute_dtype),
        )
        return DrafterWorker(
            name="0",
            drafter=drafter,
            borrowed=borrowed,
            settings=config.train,
            plan=StepPlan(last_step=last_step, checkpoint_every=config.checkpoint.every_steps, save=self._save),
            receiver=self.queue.receiver(),
            mailbox=self.mailbox,
            cells=self._cells,
            stop=self._stop,
            num_threads=num_threads(config),
        )

    def _make_target_worker(self) -> TargetWorker:
        settings = self.config.train
        cursor = self.drafter_worker.state.cursor
        return TargetWorker(
            name="0",
            target=self._materials.target,
            batches=Batches(self._materials.samples, batch_size=settings.batch_size, seed=settings.seed),
            indices=cursor.remaining(settings.steps * settings.accumulate),
            sender=self.queue.sender(),
            cells=self._cells,
            stop=self._stop,
            num_threads=num_threads(self.config),
        )

    def _save(self, checkpoint: Checkpoint) -> None:
        path = self._store.save(checkpoint)
        self.event("checkpoint", step=checkpoint.state.step, path=str(path))

    def _pull(self) -> None:
        if not self._telemetry_owns_gpu:  # once: after a fault of the GPU it would raise
            own_gpu(self._drafter_device)
            self._telemetry_owns_gpu = True
        self._queue_metrics.pull()
        self._allocator_metrics.pull()
        self._target_worker.timers.collect()
        self.drafter_worker.timers.collect()
        assert self.publisher is not None
        self._ring_metrics.pull(self.publisher.ring)

    def _count_skipped(self, skipped: Counter[str]) -> None:
        for reason in SKIP_REASONS:
            self._cells.counter("dflash_samples_skipped_total", reason=reason).add(skipped[reason])


def device_of(indices: tuple[int, ...]) -> torch.device:
    """The device that a list of CUDA indices names; raises ValueError when there is no such GPU."""
    if not indices:
        return torch.device("cpu")
    if indices[0] >= torch.cuda.device_count():
        raise ValueError(
            f"devices: there is no CUDA device {indices[0]} ({torch.cuda.device_count()} found); [] is the CPU"
        )
    return torch.device("cuda", indices[0])


def num_threads(config: TrainerConfig) -> int:
    """Threads of each worker's CPU kernels: those set, else an equal share of the cores."""
    return config.devices.cpu_threads or max(1, len(os.sched_getaffinity(0)) // NUM_WORKERS)


def _uuid(device: torch.device) -> str:
    return uuid_of(device, torch.cuda, os.environ)


def _drain(steps: Iterable[Step]) -> None:
    for _ in steps:
        pass
