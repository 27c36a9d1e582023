"""What can be wrong with one metric definition: its keys, its names, and what its expression refers to.

Checks return complaints instead of raising, so that one look at a file finds everything. The catalogue maps the
names of raw families to their kinds; a histogram stands for its `_bucket`, `_sum` and `_count` series.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from shared.schema import Family, Kind
from sidecar.promql.engine import history_needed_s
from sidecar.promql.syntax import Aggregation, Binary, Call, Negation, Node, Number, Selector, Text, walk
from sidecar.store import NAME_LABEL

METRIC_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
PLACEHOLDER = re.compile(r"\{([a-zA-Z_][a-zA-Z0-9_]*)\}")
MAX_NAME_LENGTH = 128
MAX_HISTORY_S = 3_600.0
"""The store keeps as much history as the longest look back: 16 bytes a sample, 30 MB an hour for 500 series at 1 Hz."""
HISTOGRAM_SUFFIXES = ("_bucket", "_sum", "_count")
OF_COUNTERS = frozenset({"rate", "irate", "increase"})
OF_GAUGES = frozenset({"delta"})

REQUIRED_KEYS = ("name", "help", "type", "expr")
CHOICES = {"type": ("gauge", "counter"), "at": ("tick", "step")}
KEYS = (*REQUIRED_KEYS, "at", "wandb")

ROW_KEYS = frozenset({"train/step", "time/elapsed_s"})
"""W&B keys that are axes of every chart; a definition must not write them."""
_WANDB_KEY = re.compile(r"[a-zA-Z0-9][-a-zA-Z0-9_.]*(/[-a-zA-Z0-9_.]+)*")


class Complaint(NamedTuple):
    """One thing wrong, with the key that holds it and the part of its value to look at."""

    message: str
    key: str = ""
    token: str = ""


def catalogue_of(*tables: Iterable[Family]) -> dict[str, Kind]:
    """Return the kind of each family in some tables of families."""
    return {family.name: family.kind for table in tables for family in table}


def series_kinds(catalogue: Mapping[str, Kind]) -> dict[str, Kind]:
    """Return the kind of each series name that the families of a catalogue expose."""
    kinds: dict[str, Kind] = {}
    for name, kind in catalogue.items():
        names = [name + suffix for suffix in HISTOGRAM_SUFFIXES] if kind == "histogram" else [name]
        kinds |= dict.fromkeys(names, "counter" if kind == "histogram" else kind)
    return kinds


def nearest(word: str, known: Collection[str]) -> str:
    """Return a clause that names the known word most like a mistyped one, or nothing."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def check_keys(table: Mapping[str, object]) -> Iterator[Complaint]:
    """Check which keys a definition has and the type of their values."""
    for key, value in table.items():
        if key not in KEYS:
            remedy = nearest(key, KEYS) or f"; the keys are {', '.join(KEYS)}"
            yield Complaint(f"unknown key {key!r}{remedy}", key)
        elif not isinstance(value, str) or not value.strip():
            yield Complaint(f"{key} must be a string that is not empty", key)
        elif key in CHOICES and value not in CHOICES[key]:
            yield Complaint(f"{key} is {value!r}; it must be {' or '.join(CHOICES[key])}", key)
    for key in REQUIRED_KEYS:
        if key not in table:
            yield Complaint(f"{key} is missing; add it")


def check_name(name: str, kind: str, catalogue: Mapping[str, Kind]) -> Iterator[Complaint]:
    """Check the name of a metric against the rules of Prometheus and the raw families."""
    if not METRIC_NAME.fullmatch(name):
        yield Complaint(f"the name {name!r} is not a metric name: letters, digits and _, no digit first", "name")
    elif name in catalogue or name in series_kinds(catalogue):
        yield Complaint("the name is that of a raw metric; choose another", "name")
    elif len(name) > MAX_NAME_LENGTH:
        yield Complaint(f"the name has {len(name)} characters, more than {MAX_NAME_LENGTH}; shorten it", "name")
    elif kind == "counter" and not name.endswith("_total"):
        yield Complaint(f"the name of a counter ends in _total; call it {name}_total", "name")
    elif kind == "gauge" and name.endswith(suffixes := ("_total", *HISTOGRAM_SUFFIXES, "_created")):
        yield Complaint(f"the name of a gauge must not end in {', '.join(suffixes)}; choose another", "name")


def check_wandb_key(template: str, node: Node | None) -> Iterator[Complaint]:
    """Check the template of a W&B key against W&B and against the labels that the expression can give."""
    filled = PLACEHOLDER.sub("x", template)
    if not _WANDB_KEY.fullmatch(filled):
        yield Complaint(
            f"wandb is {template!r}; write a key like group/name or group/{{label}} of letters, digits, _ . - and /",
            "wandb",
        )
    elif template in ROW_KEYS:
        yield Complaint(f"wandb is {template!r}, which every row has already; choose another key", "wandb")
    possible = _possible_labels(node) if node is not None else None
    for label in PLACEHOLDER.findall(template):
        if possible is not None and label not in possible:
            kept = ", ".join(sorted(possible)) or "none"
            yield Complaint(f"wandb has {{{label}}}, but the labels the expression keeps are: {kept}", "wandb")


def _possible_labels(node: Node) -> frozenset[str] | None:
    """Return the labels that a result can have at most; None when anything is possible."""
    match node:
        case Number():
            return frozenset()
        case Aggregation(without=False, labels=labels):
            return labels
        case Negation(operand) | Binary(left=operand, right=Number()) | Binary(left=Number(), right=operand):
            return _possible_labels(operand)
        case Binary(operation, left=left) if operation.operator != "or" and operation.matching.cardinality != "right":
            kept = _possible_labels(left)
            return None if kept is None else kept | frozenset(operation.matching.include)
        case _:
            return None


def check_series(node: Node, catalogue: Mapping[str, Kind], defined: Collection[str]) -> Iterator[Complaint]:
    """Check that an expression refers to known series and treats each as what it is."""
    if isinstance(node, Text) or (isinstance(node, Selector) and node.range_us is not None):
        yield Complaint("expr gives a string or a range of samples; it must give a number or a vector", "expr")
    if (history_s := history_needed_s(node)) > MAX_HISTORY_S:
        yield Complaint(f"expr looks back {history_s:g} s, more than {MAX_HISTORY_S:g} s; shorten its ranges", "expr")
    kinds = series_kinds(catalogue)
    for part in walk(node):
        if isinstance(part, Selector):
            yield from _check_selector(part, kinds, catalogue, defined)
        elif isinstance(part, Call):
            yield from _check_call(part, kinds)


def _check_selector(
    selector: Selector, kinds: Mapping[str, Kind], catalogue: Mapping[str, Kind], defined: Collection[str]
) -> Iterator[Complaint]:
    name = selector.name
    if name is None:
        conditions = [matcher for matcher in selector.matchers if matcher.label == NAME_LABEL]
        if not any(all(condition.accepts(known) for condition in conditions) for known in kinds):
            yield Complaint("no known series has a name that the selector accepts", "expr", conditions[0].value)
    elif catalogue.get(name) == "histogram":
        yield Complaint(f"{name} is a histogram; use {name}_bucket, {name}_sum or {name}_count", "expr", name)
    elif name in defined and name not in kinds:
        yield Complaint(
            f"{name} is itself defined in this file; definitions read raw series only: write its expression here",
            "expr",
            name,
        )
    elif name not in kinds:
        yield Complaint(f"unknown series {name}{nearest(name, kinds)}", "expr", name)


def _check_call(call: Call, kinds: Mapping[str, Kind]) -> Iterator[Complaint]:
    function = call.function
    if function == "histogram_quantile":
        for part in walk(call.arguments[1]):
            name = part.name or "" if isinstance(part, Selector) else ""
            if name in kinds and not name.endswith("_bucket"):
                yield Complaint(f"histogram_quantile() needs _bucket series, {name} is none", "expr", name)
    for part in call.arguments:
        name = part.name or "" if isinstance(part, Selector) else ""
        kind = kinds.get(name)
        if function in OF_COUNTERS and kind == "gauge":
            remedy = "use delta(), or avg_over_time() and the like"
            yield Complaint(f"{function}() of the gauge {name}: it is for counters; {remedy}", "expr", name)
        elif function in OF_GAUGES and kind == "counter":
            yield Complaint(f"{function}() of the counter {name}: it ignores resets; use increase()", "expr", name)
