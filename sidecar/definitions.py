"""Metric definitions: read from a TOML file, checked as a whole, evaluated one by one.

A file is accepted whole or not at all, and a refusal lists everything wrong with it, each with its place.

Definitions read raw series only, never each other: so there is no order among them, no cycle, and a value depends on
nothing but the samples, live or computed over the past.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from sidecar.catalogue import Catalogue, RawSeries
from sidecar.definition_checks import check_expression
from sidecar.definition_labels import possible_labels
from sidecar.definition_names import PLACEHOLDER, check_keys, check_name, check_wandb_key, keys_clash
from sidecar.definition_source import Complaint, DefinitionsError, Problem, Source, read_source
from sidecar.expression import parse_expression
from sidecar.promql.engine import LOOKBACK_S, evaluate, history_needed_s
from sidecar.promql.functions import OF_NOTHING_NOTHING
from sidecar.promql.syntax import Call, Node, Selector, walk
from sidecar.promql.values import PromqlError, Vector, distinct, without_name
from sidecar.samples import RUN_LABEL, ExportedFamily, Labels, occupied_names
from sidecar.store import Store

SHIPPED_FILE = Path(__file__).with_name("metrics.toml")
MAX_SELECTED_SERIES = 20_000
"""Series that the selectors of one definition may find together; more would take the time of all others."""

At = Literal["tick", "step"]
_NOT_IN_KEYS = re.compile(r"[^-a-zA-Z0-9_.:]")


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """One derived metric.

    Attributes:
        node: the checked syntax tree of `expr`.
        wandb: the template of its W&B key.
        selectors: those of `node`.
        needs_series: whether it gives nothing while its selectors find nothing.
        line: where it begins in its file; 0 when not known.
    """

    name: str
    help: str
    kind: Literal["gauge", "counter"]
    expr: str
    at: At
    wandb: str | None
    node: Node
    selectors: tuple[Selector, ...] = ()
    needs_series: bool = False
    line: int = 0

    def differences(self, other: "Definition") -> list[str]:
        """The keys in which it differs from another one of its name."""
        names = {"type": "kind", "help": "help", "expr": "expr", "at": "at", "wandb": "wandb"}
        return [key for key, field in names.items() if getattr(self, field) != getattr(other, field)]


class Failure(msgspec.Struct, frozen=True):
    """Why a definition gave nothing, or nothing for W&B, at one evaluation."""

    metric: str
    message: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one evaluation of a set gave: families for Prometheus, finite values by W&B key, and what failed."""

    families: tuple[ExportedFamily, ...]
    wandb: dict[str, float]
    failures: tuple[Failure, ...]


class DefinitionSet(msgspec.Struct, frozen=True, kw_only=True):
    """All definitions of a file. Immutable, so that a set can be swapped for another in one assignment.

    Attributes:
        file: Where they were read from.
        digest: Sixteen hex digits of the SHA-256 of the file.
        content: What the file held.
        definitions: In the order of the file.
        history_s: How far back the expressions look, in seconds; a store must keep at least that much.
    """

    file: Path
    digest: str
    content: bytes = b""
    definitions: tuple[Definition, ...]
    history_s: float

    def evaluate(self, store: Store, time_s: float, at: At, run: str = "") -> Outcome:
        """Evaluate the definitions for ticks or for steps; one that fails hurts no other.

        Args:
            store: recent samples.
            time_s: Unix time.
            at: which of them.
            run: the `run` label of the trainer whose W&B row is made; the first trainer has none.
        """
        families: list[ExportedFamily] = []
        wandb: dict[str, float] = {}
        failures: list[Failure] = []
        for definition in self.definitions:
            if definition.at != at:
                continue
            try:
                vector = values_of(definition, store, time_s)
                if vector:
                    points = tuple((definition.name, labels, value) for labels, value in vector)
                    families.append(ExportedFamily(definition.name, definition.kind, definition.help, points))
                _log(definition, vector, run, wandb)
            except Exception as error:  # noqa: BLE001 - one bad definition must never take the others with it
                failures.append(Failure(definition.name, f"{type(error).__name__}: {error}"))
        return Outcome(families=tuple(families), wandb=wandb, failures=tuple(failures))


def values_of(definition: Definition, store: Store, time_s: float) -> Vector:
    """What a definition gives at a time in Unix seconds, under its own labels; raises PromqlError."""
    num_series = sum(len(store.select(selector.matchers)) for selector in definition.selectors)
    if num_series > MAX_SELECTED_SERIES:
        raise PromqlError(f"it selects {num_series} series, more than {MAX_SELECTED_SERIES}; narrow its selectors")
    if definition.needs_series and not num_series:
        return []
    value = evaluate(definition.node, store, time_s)
    return [((), value)] if isinstance(value, float) else distinct([(without_name(ls), v) for ls, v in value])


def _log(definition: Definition, vector: Vector, run: str, wandb: dict[str, float]) -> None:
    """Add the finite values of a definition under their W&B keys: all of them, or none and a ValueError."""
    if definition.wandb is None:
        return
    values: dict[str, float] = {}
    for labels, value in _of_run(vector, run) if f"{{{RUN_LABEL}}}" not in definition.wandb else vector:
        key = _filled(definition.wandb, labels)
        if key in values or key in wandb:
            raise ValueError(f"several series fall on the W&B key {key}; add a {{label}} that tells them apart")
        values[key] = value
    wandb.update((key, value) for key, value in values.items() if math.isfinite(value))


def _of_run(vector: Vector, run: str) -> Vector:
    """The series that belong into a row of a run: its own, else those that are of no run, as a sum over all is."""
    own = [(labels, value) for labels, value in vector if dict(labels).get(RUN_LABEL, "") == run]
    return own or [(labels, value) for labels, value in vector if RUN_LABEL not in dict(labels)]


def _filled(template: str, labels: Labels) -> str:
    values = dict(labels)

    def value_of(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise ValueError(f"a series has no label {match[1]} for the W&B key {template}")
        return _NOT_IN_KEYS.sub("_", values[match[1]])

    return PLACEHOLDER.sub(value_of, template)


def load(file: Path, catalogue: Catalogue) -> DefinitionSet:
    """Read and check a file of definitions.

    Args:
        file: A TOML file of `[[metric]]` tables.
        catalogue: The raw families that expressions may refer to.

    Raises:
        DefinitionsError: The file cannot be read, or any definition in it is wrong.
    """
    return definitions_of(read_source(file), catalogue)


def definitions_of(source: Source, catalogue: Catalogue) -> DefinitionSet:
    """Check what was read from a file; raises DefinitionsError."""
    tables = source.tables()
    names = [str(table.get("name", "")) for table in tables]
    raw = RawSeries(catalogue)
    problems: list[Problem] = []
    definitions: list[Definition] = []
    for index, table in enumerate(tables):
        definition, complaints = _definition(table, source.line(index), raw, frozenset(names))
        if names[index] and names[index] == table.get("name") and names[index] not in raw.occupied:
            complaints += check_name(names[index], str(table.get("type", "")), raw.occupied.union(names))
        problems += [source.problem(complaint, index, names[index]) for complaint in complaints]
        if definition is not None:
            definitions.append(definition)
    problems += _name_problems(source, tables, raw)
    problems += _key_problems(source, tables)
    if problems:
        raise DefinitionsError(tuple(sorted(problems, key=lambda problem: (problem.line, problem.column))))
    return DefinitionSet(
        file=source.file,
        digest=source.digest,
        content=source.content,
        definitions=tuple(definitions),
        history_s=history_of(definitions),
    )


def history_of(definitions: Iterable[Definition]) -> float:
    """How far back the expressions look, in seconds."""
    return max((history_needed_s(definition.node) for definition in definitions), default=LOOKBACK_S)


def _definition(
    table: Mapping[str, object], line: int, raw: RawSeries, defined: frozenset[str]
) -> tuple[Definition | None, list[Complaint]]:
    """Return a definition if nothing is wrong with its table, and all that is wrong otherwise."""
    complaints = list(check_keys(table))
    texts = {key: value for key, value in table.items() if isinstance(value, str)}
    expr = texts.get("expr", "")
    node = None
    if expr.strip():
        try:
            node = parse_expression(expr)
        except PromqlError as error:
            complaints.append(Complaint(f"expr: {error}", "expr", error.token, getattr(error, "offset", None)))
        else:
            complaints += check_expression(node, raw, defined)
    if template := texts.get("wandb", "").strip():
        possible = None if node is None else possible_labels(node, raw.series)
        complaints += check_wandb_key(texts["wandb"], possible)
    if complaints or node is None:
        return None, complaints
    parts = tuple(walk(node))
    selectors = tuple(part for part in parts if isinstance(part, Selector))
    definition = Definition(
        name=texts["name"],
        help=texts["help"].strip(),
        kind="counter" if texts["type"] == "counter" else "gauge",
        expr=expr.strip(),
        at="step" if texts.get("at") == "step" else "tick",
        wandb=template or None,
        node=node,
        selectors=selectors,
        needs_series=bool(selectors)
        and all(part.function in OF_NOTHING_NOTHING for part in parts if isinstance(part, Call)),
        line=line,
    )
    return definition, []


def _name_problems(source: Source, tables: list[dict[str, object]], raw: RawSeries) -> Iterator[Problem]:
    """Yield a problem for each metric whose name, or what it takes for itself on a page, is another's already."""
    owners: dict[str, int] = {}
    for index, table in enumerate(tables):
        name = table.get("name")
        if not isinstance(name, str) or not name:
            continue
        names = occupied_names(name, str(table.get("type", "")))
        message = ""
        if clash := next((each for each in names if each in raw.occupied), None):
            called = "" if clash == name else f" ({clash}, as OpenMetrics calls it)"
            message = f"the name is that of a raw metric{called}; choose another"
        elif (owner := next((owners[each] for each in names if each in owners), None)) is not None:
            message = f"the name is taken by the metric in line {source.line(owner)}; choose another"
        if message:
            yield source.problem(Complaint(message, "name"), index, name)
        for each in names:
            owners.setdefault(each, index)


def _key_problems(source: Source, tables: list[dict[str, object]]) -> Iterator[Problem]:
    """Yield a problem for each W&B key that is another's key or the folder of another's key."""
    owners: dict[str, int] = {}
    for index, table in enumerate(tables):
        key = table.get("wandb")
        if isinstance(key, str):
            if other := next((other for other in owners if keys_clash(key, other)), None):
                place = f"of line {line}" if (line := source.line(owners[other], "wandb")) else "of another metric"
                message = f"wandb {key!r} clashes with {other!r} {place}; rename it"
                yield source.problem(Complaint(message, "wandb"), index, str(table.get("name", "")))
            owners.setdefault(key, index)
