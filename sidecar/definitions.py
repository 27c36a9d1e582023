"""Metric definitions: read from a TOML file, checked as a whole, evaluated one by one.

A file is accepted whole or not at all, and a refusal lists everything wrong with it, each with its line. tomllib gives
no positions, so lines are found in the text: the n-th `[[metric]]` header, the key under it, the word in its value.

Definitions read raw series only, never each other: so there is no order among them, no cycle, and a value depends on
nothing but the samples, live or computed over the past.
"""

import hashlib
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from shared.schema import Kind
from sidecar.definition_checks import PLACEHOLDER, Complaint, check_keys, check_name, check_series, check_wandb_key
from sidecar.promql.engine import LOOKBACK_S, evaluate, history_needed_s
from sidecar.promql.syntax import Node, parse
from sidecar.promql.values import PromqlError, Vector, distinct, without_name
from sidecar.samples import ExportedFamily, Labels
from sidecar.store import Store

SHIPPED_FILE = Path(__file__).with_name("metrics.toml")
MAX_FILE_BYTES = 1024 * 1024
MAX_DEFINITIONS = 1_000

At = Literal["tick", "step"]

_HEADER = re.compile(r"^[ \t]*\[\[[ \t]*metric[ \t]*\]\]", re.MULTILINE)


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing wrong with a file; `line` counts from 1, `metric` is empty when it concerns no single one."""

    file: Path
    line: int
    metric: str
    message: str

    def __str__(self) -> str:
        metric = f"{self.metric}: " if self.metric else ""
        return f"{self.file}:{self.line}: {metric}{self.message}"


class DefinitionsError(ValueError):
    """A file that was refused, with everything wrong with it, one line each."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """One derived metric; `node` is the checked syntax tree of `expr`, `wandb` the template of its W&B key."""

    name: str
    help: str
    kind: Literal["gauge", "counter"]
    expr: str
    at: At
    wandb: str | None
    node: Node


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
        definitions: In the order of the file.
        history_s: How far back the expressions look, in seconds; a store must keep at least that much.
    """

    file: Path
    digest: str
    definitions: tuple[Definition, ...]
    history_s: float

    def evaluate(self, store: Store, time_s: float, at: At) -> Outcome:
        """Evaluate the definitions for ticks or for steps at a time in Unix seconds; one that fails hurts no other."""
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
                _log(definition, vector, wandb)
            except Exception as error:  # noqa: BLE001 - one bad definition must never take the others with it
                failures.append(Failure(definition.name, f"{type(error).__name__}: {error}"))
        return Outcome(families=tuple(families), wandb=wandb, failures=tuple(failures))


def values_of(definition: Definition, store: Store, time_s: float) -> Vector:
    """What a definition gives at a time in Unix seconds, under its own labels; raises PromqlError."""
    value = evaluate(definition.node, store, time_s)
    return [((), value)] if isinstance(value, float) else distinct([(without_name(ls), v) for ls, v in value])


def _log(definition: Definition, vector: Vector, wandb: dict[str, float]) -> None:
    """Add the finite values of a definition under their W&B keys: all of them, or none and a ValueError."""
    if definition.wandb is None:
        return
    values: dict[str, float] = {}
    for labels, value in vector:
        key = _filled(definition.wandb, labels)
        if key in values or key in wandb:
            raise ValueError(f"several series fall on the W&B key {key}; add a {{label}} that tells them apart")
        values[key] = value
    wandb.update((key, value) for key, value in values.items() if math.isfinite(value))


def _filled(template: str, labels: Labels) -> str:
    values = dict(labels)

    def value_of(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise ValueError(f"a series has no label {match[1]} for the W&B key {template}")
        return values[match[1]]

    return PLACEHOLDER.sub(value_of, template)


def load(file: Path, catalogue: Mapping[str, Kind]) -> DefinitionSet:
    """Read and check a file of definitions.

    Args:
        file: A TOML file of `[[metric]]` tables.
        catalogue: Kinds of the raw families that expressions may refer to, see `definition_checks.catalogue_of`.

    Raises:
        DefinitionsError: The file cannot be read, or any definition in it is wrong.
    """
    source = _Source(file, _read(file))
    tables = _tables(source)
    names = [str(table.get("name", "")) for table in tables]
    problems: list[Problem] = []
    definitions: list[Definition] = []
    for index, table in enumerate(tables):
        definition, complaints = _definition(table, catalogue, frozenset(names))
        first = names.index(names[index])
        if names[index] and first != index:
            complaints.append(Complaint(f"the name is taken by the metric in line {source.line(first)}", "name"))
        problems += [source.problem(complaint, index, names[index]) for complaint in complaints]
        if definition is not None:
            definitions.append(definition)
    problems += _key_problems(source, tables)
    if problems:
        raise DefinitionsError(tuple(sorted(problems, key=lambda problem: problem.line)))
    return DefinitionSet(
        file=file,
        digest=hashlib.sha256(source.text.encode()).hexdigest()[:16],
        definitions=tuple(definitions),
        history_s=max((history_needed_s(definition.node) for definition in definitions), default=LOOKBACK_S),
    )


class _Source:
    """The text of a file, to find the lines that things stand on."""

    def __init__(self, file: Path, text: str) -> None:
        self.file = file
        self.text = text
        self._headers = [match.start() for match in _HEADER.finditer(text)]

    def line(self, index: int, key: str = "", token: str = "") -> int:
        """Return the line of a word in the value of a key of the table with an index, or the nearest line known."""
        if index >= len(self._headers):
            return 1
        position = self._headers[index]
        end = self._headers[index + 1] if index + 1 < len(self._headers) else len(self.text)
        if key and (
            match := re.compile(rf'^[ \t]*"?{re.escape(key)}"?[ \t]*=', re.MULTILINE).search(self.text, position, end)
        ):
            position = match.end()
            if token and (found := self.text.find(token, position, end)) >= 0:
                position = found
        return self.text.count("\n", 0, position) + 1

    def problem(self, complaint: Complaint, index: int, metric: str) -> Problem:
        """Give a complaint about the table with an index its place."""
        line = self.line(index, complaint.key, complaint.token)
        return Problem(file=self.file, line=line, metric=metric, message=complaint.message)

    def refusal(self, message: str, line: int = 1) -> DefinitionsError:
        """Return the error for something that concerns the whole file."""
        return DefinitionsError((Problem(file=self.file, line=line, metric="", message=message),))


def _read(file: Path) -> str:
    refusal = _Source(file, "").refusal
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise refusal(f"cannot be read: {error.strerror}; give the path of a readable TOML file") from error
    if len(content) > MAX_FILE_BYTES:
        raise refusal(f"the file has more than {MAX_FILE_BYTES} bytes; split it up")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise refusal("the file is not UTF-8; save it as UTF-8", line) from error


def _tables(source: _Source) -> list[dict[str, object]]:
    try:
        document = tomllib.loads(source.text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"at line (\d+)", str(error))
        line = int(at[1]) if at else source.text.count("\n") + 1
        raise source.refusal(f"the file is not TOML: {error}", line) from error
    except RecursionError as error:
        raise source.refusal("the file is not a file of metrics: its values are nested too deeply") from error
    tables = document.pop("metric", [])
    if document:
        raise source.refusal(f"unknown keys {', '.join(document)}; a file holds [[metric]] tables and nothing else")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise source.refusal("metric must be a list of tables; write [[metric]] above each definition")
    if len(tables) > MAX_DEFINITIONS:
        raise source.refusal(f"the file has {len(tables)} metrics, more than {MAX_DEFINITIONS}; split it up")
    return tables


def _definition(
    table: Mapping[str, object], catalogue: Mapping[str, Kind], defined: frozenset[str]
) -> tuple[Definition | None, list[Complaint]]:
    """Return a definition if nothing is wrong with its table, and all that is wrong otherwise."""
    complaints = list(check_keys(table))
    texts = {key: value for key, value in table.items() if isinstance(value, str)}
    if name := texts.get("name"):
        complaints += check_name(name, texts.get("type", ""), catalogue)
    node = None
    if expr := texts.get("expr", "").strip():
        try:
            node = parse(expr)
            complaints += check_series(node, catalogue, defined)
        except PromqlError as error:
            complaints.append(Complaint(f"expr: {error}", "expr", error.token))
    if template := texts.get("wandb"):
        complaints += check_wandb_key(template, node)
    if complaints or node is None:
        return None, complaints
    definition = Definition(
        name=texts["name"],
        help=texts["help"].strip(),
        kind="counter" if texts["type"] == "counter" else "gauge",
        expr=expr,
        at="step" if texts.get("at") == "step" else "tick",
        wandb=template,
        node=node,
    )
    return definition, []


def _key_problems(source: _Source, tables: list[dict[str, object]]) -> Iterator[Problem]:
    """Yield a problem for each W&B key that is another's key or the folder of another's key."""
    owners: dict[str, int] = {}
    for index, table in enumerate(tables):
        key = table.get("wandb")
        if isinstance(key, str):
            for other, owner in owners.items():
                if key == other or key.startswith(f"{other}/") or other.startswith(f"{key}/"):
                    message = f"wandb {key!r} clashes with {other!r} of line {source.line(owner, 'wandb')}; rename it"
                    yield source.problem(Complaint(message, "wandb"), index, str(table.get("name", "")))
                    break
            owners.setdefault(key, index)
