"""Make the result that `/metrics` shows and the status document, once per turn of the main loop."""

import importlib.metadata
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shared.catalogue import STEP_FAMILIES, TRAINER_FAMILIES
from sidecar.collectors.catalogue import COLLECTOR_FAMILIES
from sidecar.collectors.reading import Reading, Value, export, families_of
from sidecar.definition_checks import catalogue_of
from sidecar.definitions import Outcome
from sidecar.exposition import LIVENESS_FAMILIES, SIDECAR_FAMILIES, counted, liveness, merged
from sidecar.journal import Journal
from sidecar.live_definitions import LiveDefinitions
from sidecar.outlet import WandbOutlet
from sidecar.pipeline import Pipeline
from sidecar.samples import Result, labels_of, samples_of
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

CATALOGUE = catalogue_of(TRAINER_FAMILIES, STEP_FAMILIES, COLLECTOR_FAMILIES, LIVENESS_FAMILIES, SIDECAR_FAMILIES)
"""Every raw family a definition may refer to."""
DISTRIBUTION = "dflash-trainer"
START_S = time.time()
"""When this process began."""
_NOTHING = Outcome(families=(), wandb={}, failures=())


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
        self.document: StatusDocument

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
        derived = self._derive(now_s)
        counts = self._journal.counts()
        feeds = [feed for feed in self._pipeline.feeds.values() if feed.stored.ended_s is None]
        wandb = self._outlet.state()
        own = export(
            SIDECAR_FAMILIES, [*counted(counts), *self._about_definitions(derived), *self._about_sinks(sink, wandb)]
        )
        shown = (*liveness(feeds, self._pipeline.gone), *own)
        self._pipeline.add_samples("sidecar", samples_of(shown, now_s), now_s)
        raw = (family for feed in feeds for family in feed.families())
        families = merged((*shown, *families_of(readings), *raw, *(f for outcome in derived for f in outcome.families)))
        sink.publish(Result(time_s=now_s, families=families))
        self.document = StatusDocument(
            trainers=tuple(trainer_status(feed, now_s) for feed in feeds),
            records=record_status(counts),
            sinks={"prometheus": SinkStatus(state="serving", lag=0), "wandb": wandb},
            definitions=self._definition_status(derived),
            sidecar=msgspec.structs.replace(self._own, uptime_s=round(now_s - START_S, 3)),
            journal=self._journal_status,
        )

    def summary(self) -> str:
        """One line for the service manager."""
        trainers, records = self.document.trainers, self.document.records
        who = ", ".join(f"trainer {t.pid} at step {t.step}" for t in trainers) or "no trainer"
        return f"{who}; {records.received} records, {records.lost} lost"

    def _derive(self, now_s: float) -> tuple[Outcome, ...]:
        """Evaluate the definitions: those for steps at the time of the newest step, and only once for each."""
        if not self._pipeline.is_caught_up:
            return ()
        live, store = self._definitions.current, self._pipeline.store
        steps = [feed.newest_step.time_s for feed in self._pipeline.feeds.values() if feed.newest_step is not None]
        if not steps:
            return (live.evaluate(store, now_s, "tick"),)
        key = (max(steps), live.digest)
        if self._step_outcome[:2] != key:
            self._step_outcome = (*key, live.evaluate(store, max(steps), "step"))
        return live.evaluate(store, now_s, "tick"), self._step_outcome[2]

    def _about_definitions(self, derived: Sequence[Outcome]) -> list[Value]:
        live = self._definitions.current
        failing = {failure.metric for outcome in derived for failure in outcome.failures}
        return [
            ("dflash_definitions_info", labels_of(digest=live.digest), 1.0),
            *(
                ("dflash_definition_success", labels_of(metric=d.name), float(d.name not in failing))
                for d in live.definitions
            ),
        ]

    def _about_sinks(self, sink: PrometheusSink, wandb: SinkStatus) -> list[Value]:
        return [
            ("dflash_sidecar_info", labels_of(version=self._version), 1.0),
            ("dflash_sidecar_start_time_seconds", (), START_S),
            ("dflash_journal_up", (), float(self._journal.is_on_disk)),
            ("dflash_sink_lag_records", labels_of(sink="wandb"), float(wandb.lag)),
            ("dflash_sink_dropped_total", labels_of(sink="prometheus"), float(sink.num_dropped)),
            ("dflash_sink_dropped_total", labels_of(sink="wandb"), float(self._outlet.num_dropped)),
        ]

    def _definition_status(self, derived: Sequence[Outcome]) -> DefinitionStatus:
        live = self._definitions.current
        return DefinitionStatus(
            file=str(live.file),
            digest=live.digest,
            problem=self._definitions.problem or "",
            failing={failure.metric: failure.message for outcome in derived for failure in outcome.failures},
        )


def _version() -> str:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "source"  # run from a checkout that was never installed
