"""What a set of definitions would change, and what it gives over the journal. Nothing is written.

The journal is read in the process that asks, so a running sidecar does not notice, and none needs to run. Values are
those at the newest record; what the sidecar says about itself is not in the journal, so a definition over that alone
gives nothing here.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from shared.wire import Step
from sidecar.database import DatabaseError
from sidecar.definitions import Definition, DefinitionSet, Failure, Outcome
from sidecar.history import replay
from sidecar.journal import Journal
from sidecar.samples import Labels
from sidecar.store import Store

MAX_SHOWN_SERIES = 8
_NO_RECORDS = "there is no record yet, so no values to show"


class DryRun(NamedTuple):
    """What a set gave at the newest record; `time_s` is None, and `why` says why, when there is none."""

    time_s: float | None
    outcomes: tuple[Outcome, ...]
    why: str = ""

    @property
    def failures(self) -> dict[str, Failure]:
        """What failed, by metric."""
        return {failure.metric: failure for outcome in self.outcomes for failure in outcome.failures}

    def points(self, name: str) -> list[tuple[Labels, float]]:
        """The values of a metric."""
        families = (family for outcome in self.outcomes for family in outcome.families if family.name == name)
        return [(labels, value) for family in families for _, labels, value in family.points]


def dry_run(journal_path: Path, definitions: DefinitionSet) -> DryRun:
    """Evaluate a set at the newest record of a journal."""
    if not journal_path.exists():
        return DryRun(None, (), _NO_RECORDS)
    try:
        with closing(Journal(journal_path, read_only=True)) as journal:
            return _evaluated(journal, definitions)
    except (DatabaseError, sqlite3.Error) as error:
        return DryRun(None, (), f"no values to show: {error}")


def _evaluated(journal: Journal, definitions: DefinitionSet) -> DryRun:
    sessions = journal.sessions()
    newest_s = max((time_s for s in sessions if (time_s := journal.last_time_s(s.number)) is not None), default=None)
    if newest_s is None:
        return DryRun(None, (), _NO_RECORDS)
    store: Store | None = None
    for moment in replay(journal, definitions.definitions, newest_s):
        store = moment.store
    if store is None:
        return DryRun(None, (), _NO_RECORDS)
    outcomes = [definitions.evaluate(store, newest_s, "tick")]
    steps = [step for s in sessions if (step := next(journal.newest(s, Step), None)) is not None]
    step_s = max((step.time_s for step in steps), default=None)
    if step_s is not None:
        outcomes.append(definitions.evaluate(store, step_s, "step"))
    return DryRun(newest_s, tuple(outcomes))


def diff(old: DefinitionSet | None, new: DefinitionSet, values: DryRun) -> Iterator[str]:
    """Lines that say what is added, changed and removed, with the values that it gives now."""
    before = {definition.name: definition for definition in old.definitions} if old is not None else {}
    after = {definition.name: definition for definition in new.definitions}
    num_unchanged = 0
    for name, definition in after.items():
        if name not in before:
            yield f"added      {name} ({', '.join(_manner(definition))})"
        elif differences := definition.differences(before[name]):
            yield f"changed    {name} ({', '.join(differences)})"
        else:
            num_unchanged += 1
            continue
        yield from _value_lines(name, values)
    for name, definition in before.items():
        if name not in after:
            where = f" and under {definition.wandb} in W&B" if definition.wandb else ""
            yield f"removed    {name}: it ends here; its past stays in Prometheus{where}"
    yield f"unchanged  {num_unchanged}"
    if values.time_s is not None:
        newest = datetime.fromtimestamp(values.time_s, UTC)
        yield f"values are those at {newest:%Y-%m-%d %H:%M:%S} UTC, the newest record"


def _manner(definition: Definition) -> Iterator[str]:
    yield definition.kind
    yield f"at each {definition.at}"
    if definition.wandb:
        yield f"W&B {definition.wandb}"


def _value_lines(name: str, values: DryRun) -> Iterator[str]:
    points = values.points(name)
    for labels, value in points[:MAX_SHOWN_SERIES]:
        pairs = ",".join(f'{label}="{text}"' for label, text in labels)
        yield f"             {f'{{{pairs}}} ' if pairs else ''}{value:g}"
    if len(points) > MAX_SHOWN_SERIES:
        yield f"             and {len(points) - MAX_SHOWN_SERIES} more series"
    if not points:
        yield f"             {values.why or 'no value now: nothing matches'}"
