"""A real training run beside a real sidecar, and the checks of what came of it.

The run goes on until there is enough to see and is then ended by SIGTERM, as a user would end it.
"""

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from bench.gpu_check.guarded_trainer import CONTROL_THREAD, GuardReport
from bench.gpu_check.outcome import CheckFailedError, CheckSkippedError, Figures
from bench.gpu_check.sync_watch import WARM_UP_STEPS, on_step_path, step_times_s
from bench.workplace import BenchmarkError, SidecarProcess, Workplace, fetch
from sidecar.samples import Labels, labels_of
from trainer.app import ALLOCATOR_VARIABLES

RUN_ID = "gpu-check"
SETTINGS = {
    "run.id": RUN_ID,
    "train.steps": 100_000,
    "checkpoint.every_steps": 100_000,
    "evaluation.num_prompts": 0,
    "telemetry.interval_s": 0.2,
    "telemetry.allocator_interval_s": 0.5,
}
MIN_STEPS = 30
FIRST_STEPS_TIMEOUT_S = 80.0
"""With the time to build the embedded target where it is not in the cache yet."""
END_TIMEOUT_S = 20.0
ENDED_BY_SIGTERM = 128 + 15
DEVICE_PHASES = (("target", "forward"), ("drafter", "forward"), ("drafter", "backward"))
ALLOCATOR = "dflash_cuda_allocator_"
Page = dict[tuple[str, Labels], float]


class RunFacts(NamedTuple):
    """What is left of a run."""

    page: Page
    """The sidecar's page while it trained."""
    status: dict[str, Any]
    """The sidecar's status after its end."""
    exit_code: int
    report: GuardReport
    times_s: list[float]
    """Ends of steps."""


class WatchedRun:
    """The run, and the checks of it.

    Args:
        devices: of the target and of the drafter, as settings of the trainer have them.
        options: more options of `dflash-train`; without any, the embedded preset.
        uuids: of the GPUs it runs on.
        seconds: how long it goes on after the first steps.
    """

    def __init__(
        self, devices: tuple[Sequence[int], Sequence[int]], options: Sequence[str], uuids: Sequence[str], seconds: float
    ) -> None:
        self._devices = devices
        self._options = options
        self._uuids = uuids
        self._seconds = seconds
        self._facts: RunFacts | None = None

    def check_run(self, figures: Figures) -> str:
        """It trains, its loss is a number, it ends as asked, and no record is lost."""
        with Workplace() as place:
            facts = self._facts = self._train(place)
        times_s, loss = facts.times_s, facts.page.get(("dflash_loss", ()), math.nan)
        speed = (len(times_s) - 1) / (times_s[-1] - times_s[0])
        figures |= {"steps": len(times_s), "steps_per_second": speed, "loss": loss}
        figures |= {f"records_{name}": facts.status["records"][name] for name in ("received", "lost")}
        for role, phase in DEVICE_PHASES:
            key = ("dflash_phase_seconds_total", labels_of(role=role, worker="0", phase=phase))
            figures[f"{role}_{phase}_s"] = facts.page.get(key)
        if facts.exit_code != ENDED_BY_SIGTERM:
            raise CheckFailedError(f"the run ended with {facts.exit_code} after SIGTERM, not {ENDED_BY_SIGTERM}")
        if not math.isfinite(loss) or not figures["drafter_backward_s"]:
            raise CheckFailedError(f"loss {loss}, {figures['drafter_backward_s']} s in backward passes")
        if figures["records_lost"]:
            raise CheckFailedError(f"{figures['records_lost']} records of {figures['records_received']} were lost")
        return f"{len(times_s)} steps, {speed:.1f} a second, loss {loss:.3f}, no record lost"

    def check_synchronisations(self, figures: Figures) -> str:
        """After the warm-up no thread of a drafter or of telemetry ever waited for a GPU."""
        facts = self._known_facts()
        if not facts.report.is_guarded:
            raise CheckSkippedError("the run had no GPU to wait for")
        found = on_step_path(facts.report.synchronisations, facts.times_s)
        elsewhere = [one for one in facts.report.synchronisations if one not in found]
        figures["guarded_steps"] = len(facts.times_s) - WARM_UP_STEPS
        figures["waits"] = len(found)
        figures["places"] = sorted({f"{one.thread}: {one.place}" for one in found})
        figures["waits_allowed"] = len(elsewhere)
        figures["places_allowed"] = sorted({f"{one.thread}: {one.place}" for one in elsewhere})
        if not any(one.thread == CONTROL_THREAD for one in elsewhere):
            raise CheckFailedError("torch's sync-debug mode did not notice a wait that was made on purpose")
        if found:
            raise CheckFailedError(f"{len(found)} waits on the step path: {figures['places']}")
        return f"none in {figures['guarded_steps']} steps"

    def check_allocator(self, figures: Figures) -> str:
        """The allocator's figures reach the page, hang together, and its segments grow."""
        facts = self._known_facts()
        if not self._uuids:
            raise CheckSkippedError("the run had no GPU to allocate on")
        found = {key: value for key, value in facts.page.items() if key[0].startswith(ALLOCATOR)}
        for (name, labels), value in found.items():
            figures[f"{name.removeprefix(ALLOCATOR)} {dict(labels)['device']}"] = value
        figures["expandable_ratio"] = facts.report.expandable_bytes / max(facts.report.reserved_bytes, 1)
        for device in sorted({dict(labels)["device"] for _, labels in found}):
            allocated, peak, reserved = (
                found.get((f"{ALLOCATOR}{size}_bytes", labels_of(device=device)), 0.0)
                for size in ("allocated", "allocated_peak", "reserved")
            )
            if not 0 < allocated <= peak or not allocated <= reserved:
                raise CheckFailedError(f"{device}: allocated {allocated:g}, peak {peak:g}, reserved {reserved:g} bytes")
        if not found:
            raise CheckFailedError("the page has no figures of the allocator")
        if not facts.report.expandable_bytes and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
            raise CheckFailedError("no segment of the allocator can grow, though nobody asked for another setting")
        return f"{len(found)} series; {figures['expandable_ratio']:.0%} of the memory in segments that grow"

    def check_owners(self, figures: Figures) -> str:
        """The GPUs of the run carry the roles of its workers, under the UUIDs that the driver gives them."""
        facts = self._known_facts()
        infos = [dict(labels) for name, labels in facts.page if name == "dflash_gpu_info"]
        owned = {info["uuid"]: info["role"] for info in infos if info["role"]}
        figures["owned"] = sorted(f"{uuid}: {role}" for uuid, role in owned.items())
        if not self._uuids:
            raise CheckSkippedError("the run had no GPU to own")
        if owned.keys() != set(self._uuids):
            raise CheckFailedError(f"the run is on {self._uuids}, the page says {figures['owned'] or 'nothing'}")
        return "; ".join(f"{uuid}: {role}" for uuid, role in owned.items())

    def _train(self, place: Workplace) -> RunFacts:
        sidecar = place.sidecar(("--set", "wandb.mode=offline", "--set", "interval_s=0.5"))
        report, audit, out_dir = place.path / "guard.json", place.path / "audit", place.path / "run"
        targets, drafters = (list(indices) for indices in self._devices)
        settings = SETTINGS | {"devices.targets": targets, "devices.drafters": drafters, "telemetry.audit_path": audit}
        options = [*self._options, *(f"--set={key}={value}" for key, value in settings.items())]
        trainer = place.popen(("-m", "bench.gpu_check.guarded_trainer", str(report), *options, "--out", str(out_dir)))
        place.wait(lambda: _step(sidecar) >= MIN_STEPS, trainer, f"{MIN_STEPS} steps", FIRST_STEPS_TIMEOUT_S)
        time.sleep(self._seconds)
        page = _page(sidecar)
        trainer.terminate()
        place.wait(report.exists, trainer, "the run to end", END_TIMEOUT_S)
        exit_code = trainer.wait(END_TIMEOUT_S)
        place.wait(lambda: not _is_up(sidecar), sidecar.process, "the sidecar to notice the end", END_TIMEOUT_S)
        written = msgspec.json.decode(Path(report).read_bytes(), type=GuardReport)
        return RunFacts(page, sidecar.status(), exit_code, written, step_times_s(audit))

    def _known_facts(self) -> RunFacts:
        if self._facts is None:
            raise CheckFailedError("there was no training run to look at; see the check before")
        return self._facts


def _page(sidecar: SidecarProcess) -> Page:
    families = text_string_to_metric_families(fetch(sidecar.url, "/metrics").decode())
    return {(one.name, labels_of(**one.labels)): one.value for family in families for one in family.samples}


def _trainers(sidecar: SidecarProcess) -> list[dict[str, Any]]:
    try:
        trainers: list[dict[str, Any]] = sidecar.status()["trainers"]
    except OSError as error:
        raise BenchmarkError(f"the sidecar does not answer: {error}") from error
    return trainers


def _step(sidecar: SidecarProcess) -> int:
    return max((int(trainer["step"]) for trainer in _trainers(sidecar)), default=0)


def _is_up(sidecar: SidecarProcess) -> bool:
    return any(trainer["up"] for trainer in _trainers(sidecar))
