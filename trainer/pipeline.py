"""The machine of one run: target workers, queue, drafter workers, and what they report, wired together.

Building it starts nothing. `train` runs the threads until the last step, a stop or a failure; the telemetry publisher
runs beside them and outlives them until `close`, so that the evaluation still reaches a sidecar.
"""

import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from shared.catalogue import TRAINER_FAMILIES
from shared.cells import Cells
from shared.curve import CurveServer
from shared.endpoint import EndpointClaim, socket_path
from shared.publisher import Identity, Publisher
from shared.redaction import without_secrets
from shared.wire import Scalar, Step
from trainer.allocator_metrics import AllocatorMetrics
from trainer.audit import AuditTrail
from trainer.checkpoint import Checkpoint, CheckpointStore, TrainState
from trainer.config import TrainerConfig
from trainer.devices import drafter_devices, num_threads, topology
from trainer.drafter import Drafter
from trainer.drafter_worker import TORCH_DTYPES, Borrowed, DrafterWorker, StepPlan
from trainer.feed import Feed
from trainer.instruments import StepMailbox, own_gpu
from trainer.prepare import Materials
from trainer.pulled_metrics import QueueMetrics, RingMetrics
from trainer.reduce import Reduction
from trainer.step_report import StepReport
from trainer.stopping import Stop
from trainer.supervisor import Supervisor
from trainer.target_worker import TargetWorker
from trainer.world import World

SKIP_REASONS = ("unsupervised", "truncated")


class Pipeline:
    """Everything that lives while a run trains.

    Args:
        config: settings of the run, `run.id` and `train.accumulate` filled in.
        materials: targets, samples and geometry.
        store: where checkpoints go.
        stop: the run's stop flag.
        world: the other processes of the run.
        last_step: where this session ends.
        resume: continue from this checkpoint.
    """

    def __init__(  # noqa: PLR0913 - the composition root calls it once, by keyword
        self,
        config: TrainerConfig,
        materials: Materials,
        store: CheckpointStore,
        *,
        stop: Stop,
        world: World,
        last_step: int,
        resume: Checkpoint | None,
    ) -> None:
        self.config = config
        self.session = uuid.uuid4().hex[:12]
        self.publisher: Publisher | None = None
        self._materials = materials
        self._store = store
        self._stop = stop
        self._world = world
        self._target_devices = [target.device for target in materials.targets]
        self._drafter_devices = drafter_devices(config)
        self._cells = Cells(TRAINER_FAMILIES)
        self._cleanup = ExitStack()
        self.mailbox = StepMailbox(
            skipped=self._cells.counter("dflash_samples_skipped_total", reason="nonfinite_gradient"),
            skipped_hidden=self._cells.counter("dflash_samples_skipped_total", reason="nonfinite_hidden"),
            dropped=self._cells.counter("dflash_telemetry_dropped_steps_total"),
        )
        self._count_skipped(materials.skipped)
        pinned = any(device.type == "cuda" for device in (*self._target_devices, *self._drafter_devices))
        state = resume.state if resume else TrainState()
        self._feed = Feed(config, materials, rank=world.rank, state=state, pinned=pinned)
        self.queue = self._feed.queue
        self._reduction = Reduction(len(self._drafter_devices), world, stop)
        self.drafter_workers = self._make_drafter_workers(last_step)
        if resume is not None:
            for worker in self.drafter_workers:
                worker.restore(resume)
        self._target_workers = self._make_target_workers()
        self._timers = [w.timers for w in self._target_workers] + [w.timers for w in self.drafter_workers]
        self._queue_metrics = QueueMetrics(self._cells, "hidden", self.queue.statistics)
        devices = {*self._target_devices, *self._drafter_devices}
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
            path = socket_path(directory, self.config.run.id, self._world.rank.number)
            self._cleanup.enter_context(EndpointClaim(path))
        self.publisher = Publisher(
            cells=self._cells,
            identity=Identity(
                run_id=self.config.run.id,
                session=self.session,
                pid=os.getpid(),
                start_time_s=time.time(),
                topology=topology("target", self._target_devices) + topology("drafter", self._drafter_devices),
                # Where it writes: the sidecar watches the space that is left there.
                config={**without_secrets(self.config.flat()), "run.out_dir": str(self._store.run_dir.absolute())},
                rank=self._world.rank.number,
                world_size=self._world.rank.world_size,
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

        Supervisor(self._stop, self._abort).run(self._work(), collect_and_watch)
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
        """Real tokens that the drafters of this process have learned from in this session."""
        return sum(worker.num_tokens_real for worker in self.drafter_workers)

    @property
    def state(self) -> TrainState:
        """Where training stands."""
        return self.drafter_workers[0].state

    @property
    def drafter(self) -> Drafter:
        """The drafter that is trained; not while `train` runs."""
        return self.drafter_workers[0].drafter

    def _work(self) -> dict[str, Callable[[], None]]:
        """Every worker's main function by the name of its thread."""
        prefetch, num_bytes = self.config.queue.prefetch, self._feed.max_batch_bytes
        targets = {f"target-{number}": worker.run for number, worker in enumerate(self._target_workers)}
        drafters = {
            f"drafter-{number}": partial(worker.run, self.queue.receiver(), prefetch, num_bytes)
            for number, worker in enumerate(self.drafter_workers)
        }
        return targets | drafters

    def _abort(self) -> None:
        self.queue.abort()
        self._reduction.abort()

    def _make_drafter_workers(self, last_step: int) -> list[DrafterWorker]:
        num_batches = self._feed.batches_per_step // len(self._drafter_devices)
        report = StepReport(self.mailbox, self._cells)
        return [
            DrafterWorker(
                number=number,
                drafter=self._make_drafter(device),
                borrowed=self._borrow(device),
                settings=self.config.train,
                plan=StepPlan(
                    last_step=last_step,
                    checkpoint_every=self.config.checkpoint.every_steps,
                    num_batches=num_batches,
                    save=self._save if number == 0 and self._world.rank.leads else None,
                ),
                reduction=self._reduction,
                cells=self._cells,
                report=report if number == 0 else None,
                num_threads=self._num_threads,
            )
            for number, device in enumerate(self._drafter_devices)
        ]

    def _make_drafter(self, device: torch.device) -> Drafter:
        generator = torch.Generator().manual_seed(self.config.train.seed)
        return Drafter(self._materials.geometry, generator).to(device)

    def _borrow(self, device: torch.device) -> Borrowed:
        target, dtype = self._materials.target, TORCH_DTYPES[self.config.train.dtype]
        return Borrowed(
            embedding_weight=target.embedding_weight.detach().to(device, dtype),
            head_weight=target.head_weight.detach().to(device, dtype),
        )

    def _make_target_workers(self) -> list[TargetWorker]:
        return [
            TargetWorker(
                name=str(number),
                target=target,
                batches=self._feed.batches,
                queue=self.queue,
                cells=self._cells,
                num_threads=self._num_threads,
            )
            for number, target in enumerate(self._materials.targets)
        ]

    @property
    def _num_threads(self) -> int:
        return num_threads(self.config, self._world.rank.local_world_size)

    def _save(self, checkpoint: Checkpoint) -> None:
        path = self._store.save(checkpoint)
        self.event("checkpoint", step=checkpoint.state.step, path=str(path))

    def _pull(self) -> None:
        if not self._telemetry_owns_gpu:  # once: after a fault of the GPU it would raise
            own_gpu(self._drafter_devices[0])
            self._telemetry_owns_gpu = True
        self._queue_metrics.pull()
        self._allocator_metrics.pull()
        for timers in self._timers:
            timers.collect()
        assert self.publisher is not None
        self._ring_metrics.pull(self.publisher.ring)

    def _count_skipped(self, skipped: Counter[str]) -> None:
        for reason in SKIP_REASONS:
            self._cells.counter("dflash_samples_skipped_total", reason=reason).add(skipped[reason])


def _drain(steps: Iterable[Step]) -> None:
    for _ in steps:
        pass
