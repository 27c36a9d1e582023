"""What can be wrong with the expression of a definition: what it refers to, how it treats it, and what it would cost.

Checks return complaints instead of raising, so that one look at a file finds everything.
"""

import difflib
from collections.abc import Collection, Iterator, Mapping

from sidecar.catalogue import Exposed, RawSeries
from sidecar.definition_labels import OF_BUCKETS, PossibleLabels, accepted_names, labels_of_selector, possible_labels
from sidecar.definition_source import Complaint
from sidecar.promql.engine import history_needed_s
from sidecar.promql.syntax import Aggregation, Binary, Call, Node, Selector, Text, walk
from sidecar.store import MICROSECONDS_PER_S, NAME_LABEL

MAX_HISTORY_S = 3_600.0
"""The store keeps as much history as the longest look back: 16 bytes a sample, 30 MB an hour for 500 series at 1 Hz."""
MAX_TOTAL_RANGE_S = 6 * 3_600.0
"""The ranges of one expression together: each of their samples may be looked at in every evaluation."""
OF_COUNTERS = frozenset({"rate", "irate", "increase", "resets"})
OF_GAUGES = frozenset({"delta", "idelta", "deriv", "predict_linear"})


def nearest(word: str, known: Collection[str]) -> str:
    """Return a clause that names the known word most like a mistyped one, or nothing."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def check_expression(node: Node, raw: RawSeries, defined: Collection[str]) -> Iterator[Complaint]:
    """Check that an expression refers to known series and labels and treats each as what it is.

    Args:
        node: the expression.
        raw: what it may refer to.
        defined: names of the definitions of the file.
    """
    if isinstance(node, Text) or (isinstance(node, Selector) and node.range_us is not None):
        yield Complaint("expr gives a string or a range of samples; it must give a number or a vector", "expr")
    yield from _check_cost(node)
    series = raw.series
    for part in walk(node):
        match part:
            case Selector():
                yield from _check_selector(part, raw, defined)
            case Call():
                yield from _check_call(part, series)
            case Aggregation(operator=operator, operand=operand, labels=labels, without=without):
                word = "without" if without else "by"
                known = possible_labels(operand, series)
                yield from _check_labels(labels, known, f"{operator} {word}", "what it aggregates")
            case Binary():
                yield from _check_matching(part, series)


def _check_cost(node: Node) -> Iterator[Complaint]:
    if (history_s := history_needed_s(node)) > MAX_HISTORY_S:
        yield Complaint(f"expr looks back {history_s:g} s, more than {MAX_HISTORY_S:g} s; shorten its ranges", "expr")
    ranges_us = [part.range_us or 0 for part in walk(node) if isinstance(part, Selector)]
    if (total_s := sum(ranges_us) / MICROSECONDS_PER_S) > MAX_TOTAL_RANGE_S:
        yield Complaint(
            f"expr has ranges of {total_s:g} s in all, more than {MAX_TOTAL_RANGE_S:g} s; shorten them or split it up",
            "expr",
        )


def _check_selector(selector: Selector, raw: RawSeries, defined: Collection[str]) -> Iterator[Complaint]:
    name, series = selector.name, raw.series
    if name is None:
        conditions = [matcher for matcher in selector.matchers if matcher.label == NAME_LABEL]
        if not accepted_names(selector, series):
            message = "no known series has a name that the selector accepts; look at docs/metrics.md for the names"
            yield Complaint(message, "expr", conditions[0].value)
    elif name in raw.histograms:
        yield Complaint(f"{name} is a histogram; use {name}_bucket, {name}_sum or {name}_count", "expr", name)
    elif name in defined and name not in series:
        yield Complaint(
            f"{name} is itself defined in this file; definitions read raw series only: write its expression here",
            "expr",
            name,
        )
    elif name not in series:
        yield Complaint(f"unknown series {name}{nearest(name, series)}", "expr", name)
    labels = {matcher.label for matcher in selector.matchers} - {NAME_LABEL}
    yield from _check_labels(labels, labels_of_selector(selector, series), "the selector", name or "any such series")


def _check_call(call: Call, series: Mapping[str, Exposed]) -> Iterator[Complaint]:
    if call.function in OF_BUCKETS:
        yield from _check_buckets(call.function, call.arguments[-1], series)
    for part in call.arguments:
        kinds = {name: series[name].kind for name in accepted_names(part, series)} if isinstance(part, Selector) else {}
        for name, kind in kinds.items():
            if call.function in OF_COUNTERS and kind == "gauge":
                remedy = "use delta(), or avg_over_time() and the like"
                yield Complaint(
                    f"{call.function}() of the gauge {name}: it is for counters; {remedy}", "expr", call.function
                )
                break
            if call.function in OF_GAUGES and kind == "counter":
                remedy = "it ignores resets; use increase() or rate()"
                yield Complaint(f"{call.function}() of the counter {name}: {remedy}", "expr", call.function)
                break


def _check_buckets(function: str, argument: Node, series: Mapping[str, Exposed]) -> Iterator[Complaint]:
    names = [name for part in walk(argument) if isinstance(part, Selector) for name in accepted_names(part, series)]
    others = [name for name in names if not name.endswith("_bucket")]
    if others:
        yield Complaint(f"{function}() needs _bucket series, {others[0]} is none", "expr", others[0])
    labels = possible_labels(argument, series)
    if names and not others and labels is not None and "le" not in labels:
        message = f"{function}() needs the label le, which is gone; keep it, as in sum by (le) (...)"
        yield Complaint(message, "expr", function)


def _check_matching(node: Binary, series: Mapping[str, Exposed]) -> Iterator[Complaint]:
    matching = node.operation.matching
    left, right = possible_labels(node.left, series), possible_labels(node.right, series)
    if left is None or right is None:
        return
    what = f"{node.operation.operator} {'on' if matching.on else 'ignoring'}"
    yield from _check_labels(matching.labels, left | right, what, "either side")
    one, group = (left, "group_right") if matching.cardinality == "right" else (right, "group_left")
    yield from _check_labels(matching.include, one, group, "the side it takes them from")


def _check_labels(labels: Collection[str], known: PossibleLabels, where: str, owner: str) -> Iterator[Complaint]:
    if known is None:
        return
    for label in sorted(frozenset(labels) - known):
        remedy = nearest(label, known) or f"; there are: {', '.join(sorted(known)) or 'none'}"
        yield Complaint(f"{where} names the label {label}, which {owner} does not have{remedy}", "expr", label)
