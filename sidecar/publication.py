"""Make the result that `/metrics` shows and the status document, once per turn of the main loop.

A set of definitions and what it gave are shown together or not at all. While the past is read again because a new set
looks further back, what the set before it gave last stays on the page.
"""

import importlib.metadata
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from sidecar.collectors.reading import Reading, export, families_of
from sidecar.definitions import DefinitionSet, Failure, Outcome
from sidecar.exposition import SIDECAR_FAMILIES, counted, liveness
from sidecar.journal import Journal
from sidecar.live_definitions import LiveDefinitions
from sidecar.outlet import WandbOutlet
from sidecar.pipeline import Pipeline
from sidecar.samples import Point, Result, labels_of, samples_of
from sidecar.sinks.prometheus import PrometheusSink
from sidecar.status import (
    DefinitionStatus,
    JournalStatus,
    SidecarStatus,
    SinkStatus,
    StatusDocument,
    record_status,
    trainer_status,
)

DISTRIBUTION = "dflash-trainer"
START_S = time.time()
"""When this process began."""
MAX_HOLD_S = 60.0
"""How long values are shown on at most while the past is read again."""
_NOTHING = Outcome(families=(), wandb={}, failures=())


class _Shown(NamedTuple):
    """A set of definitions with what it gave, and when (monotonic)."""

    definitions: DefinitionSet
    outcomes: tuple[Outcome, ...]
    time_s: float


class Publication:
    """Gathers from all parts what is shown. One thread; `document` may be read from any.

    Args:
        journal: for its counts.
        pipeline: for trainers and the store.
        definitions: for derived metrics.
        outlet: for the state of W&B.
        in_memory: why the journal is not on the disk, if it is not.
    """

    def __init__(
        self,
        journal: Journal,
        pipeline: Pipeline,
        definitions: LiveDefinitions,
        outlet: WandbOutlet,
        in_memory: str,
    ) -> None:
        self._journal = journal
        self._journal_status = JournalStatus(state="memory" if in_memory else "disk", detail=in_memory)
        self._pipeline = pipeline
        self._definitions = definitions
        self._outlet = outlet
        self._version = _version()
        self._step_outcome: tuple[float, str, Outcome] = (0.0, "", _NOTHING)
        self._shown: _Shown | None = None
        self.document: StatusDocument

    @property
    def shows_current(self) -> bool:
        """Whether the live definitions are those on the page."""
        return self._shown is not None and self._shown.definitions is self._definitions.current

    def introduce(self, url: str, state_dir: Path, runtime_dir: Path) -> None:
        """Say where this sidecar is."""
        self._own = SidecarStatus(
            pid=os.getpid(),
            version=self._version,
            uptime_s=0.0,
            url=url,
            state_dir=str(state_dir),
            runtime_dir=str(runtime_dir),
        )

    def publish(self, sink: PrometheusSink, readings: Sequence[Reading]) -> None:
        """Show what is true now."""
        now_s = time.time()
        shown = self._shown = self._derive(now_s)
        counts = self._journal.counts()
        feeds = [feed for feed in self._pipeline.feeds.values() if feed.stored.ended_s is None]
        wandb = self._outlet.state()
        own = export(
            SIDECAR_FAMILIES, [*counted(counts), *self._about_definitions(shown), *self._about_sinks(sink, wandb)]
        )
        about = (*liveness(feeds, self._pipeline.gone), *own)
        self._pipeline.add_samples("sidecar", samples_of(about, now_s), now_s)
        raw = (family for feed in feeds for family in feed.families())
        derived = (family for outcome in shown.outcomes for family in outcome.families)
        sink.publish(Result(time_s=now_s, families=(*about, *families_of(readings), *raw, *derived)))
        self.document = StatusDocument(
            trainers=tuple(trainer_status(feed, now_s) for feed in feeds),
            records=record_status(counts),
            sinks={"prometheus": SinkStatus(state="serving", lag=0), "wandb": wandb},
            definitions=self._definition_status(shown),
            sidecar=msgspec.structs.replace(self._own, uptime_s=round(now_s - START_S, 3)),
            journal=self._journal_status,
        )

    def summary(self) -> str:
        """One line for the service manager."""
        trainers, records = self.document.trainers, self.document.records
        who = ", ".join(f"trainer {t.pid} at step {t.step}" for t in trainers) or "no trainer"
        return f"{who}; {records.received} records, {records.lost} lost"

    def try_out(self, candidate: DefinitionSet) -> list[Failure]:
        """Evaluate a set without showing it; what fails in it and does not fail in the same way already."""
        failures = _failures(self._outcomes(candidate, time.time()))
        live = {definition.name: definition for definition in self._definitions.current.definitions}
        unchanged = {d.name for d in candidate.definitions if d.name in live and not d.differences(live[d.name])}
        fail_already = unchanged.intersection(_failures(self._shown.outcomes) if self._shown else ())
        return [Failure(metric, message) for metric, message in failures.items() if metric not in fail_already]

    def _derive(self, now_s: float) -> _Shown:
        """Evaluate the live set; while the store is being filled, hold what was shown last."""
        live, monotonic_s = self._definitions.current, time.monotonic()
        if self._pipeline.is_caught_up:
            return _Shown(live, self._outcomes(live, now_s), monotonic_s)
        if self._shown is not None and monotonic_s < self._shown.time_s + MAX_HOLD_S:
            return self._shown
        return _Shown(live, (), monotonic_s)

    def _outcomes(self, definitions: DefinitionSet, now_s: float) -> tuple[Outcome, ...]:
        """What a set gives: definitions for steps at the time of the newest step, and only once for each."""
        store = self._pipeline.store
        steps = [feed.newest_step.time_s for feed in self._pipeline.feeds.values() if feed.newest_step is not None]
        if not steps:
            return (definitions.evaluate(store, now_s, "tick"),)
        key = (max(steps), definitions.digest)
        if self._step_outcome[:2] != key:
            self._step_outcome = (*key, definitions.evaluate(store, max(steps), "step"))
        return definitions.evaluate(store, now_s, "tick"), self._step_outcome[2]

    def _about_definitions(self, shown: _Shown) -> list[Point]:
        failing = _failures(shown.outcomes)
        return [
            ("dflash_definitions_info", labels_of(digest=shown.definitions.digest), 1.0),
            ("dflash_config_last_reload_success", (), float(not self._definitions.problem)),
            *(
                ("dflash_definition_success", labels_of(metric=d.name), float(d.name not in failing))
                for d in shown.definitions.definitions
            ),
        ]

    def _about_sinks(self, sink: PrometheusSink, wandb: SinkStatus) -> list[Point]:
        return [
            ("dflash_sidecar_info", labels_of(version=self._version), 1.0),
            ("dflash_sidecar_start_time_seconds", (), START_S),
            ("dflash_journal_up", (), float(self._journal.is_on_disk)),
            ("dflash_sink_lag_records", labels_of(sink="wandb"), float(wandb.lag)),
            ("dflash_sink_dropped_total", labels_of(sink="prometheus"), float(sink.num_dropped)),
            ("dflash_sink_dropped_total", labels_of(sink="wandb"), float(self._outlet.num_dropped)),
        ]

    def _definition_status(self, shown: _Shown) -> DefinitionStatus:
        chosen = self._definitions.chosen
        return DefinitionStatus(
            file=str(shown.definitions.file),
            digest=shown.definitions.digest,
            problem=self._definitions.problem or "",
            failing=_failures(shown.outcomes),
            chosen="" if chosen is None else str(chosen),
            tried_digest=self._definitions.tried_digest,
            num_tried=self._definitions.num_tried,
        )


def _failures(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Why each definition that failed did."""
    return {failure.metric: failure.message for outcome in outcomes for failure in outcome.failures}


def _version() -> str:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "source"  # run from a checkout that was never installed
