"""Functions that change or make labels, as Prometheus does it: `$1` and `${name}` stand for groups of a pattern."""

import functools
import re
from collections.abc import Sequence
from typing import Any

# google-re2 publishes no types.
import re2  # type: ignore[import-untyped]

from sidecar.promql.nodes import Node, Selector
from sidecar.promql.values import PromqlError, Vector, distinct, with_label
from sidecar.samples import Labels
from sidecar.store import NAME_LABEL

_REFERENCE = re.compile(r"\$(?:\$|(\w+)|\{(\w+)\})")


@functools.lru_cache(maxsize=1024)
def whole_value_pattern(pattern: str) -> Any:  # noqa: ANN401 - re2 has no types
    """Compile a pattern that has to match a whole label value. Raises PromqlError for a broken one."""
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(f"^(?s:{pattern})$", options)
    except re2.error as error:
        raise PromqlError(f"pattern {pattern!r}: {error}", pattern) from error


def label_replace(vector: Vector, texts: Sequence[str]) -> Vector:
    """Set a label to a template filled from another label, where that one matches a pattern.

    The texts are: label to set, template, label to read, pattern.
    """
    target, template, source, pattern = texts
    compiled = whole_value_pattern(pattern)
    replaced: Vector = []
    for labels, value in vector:
        found = compiled.search(dict(labels).get(source, ""))
        changed = labels if found is None else with_label(labels, target, _expanded(template, found))
        replaced.append((changed, value))
    return distinct(replaced)


def _expanded(template: str, found: Any) -> str:  # noqa: ANN401 - a match of re2
    """Fill a template from a match; a group that does not exist or took no part is empty, `$$` is a dollar."""
    groups = [text or "" for text in (found.group(), *found.groups())]
    named = {name: text or "" for name, text in found.groupdict().items()}

    def reference(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name is None:
            return "$"
        if name.isdecimal() and (name == "0" or not name.startswith("0")):
            return groups[int(name)] if int(name) < len(groups) else ""
        return named.get(name, "")

    return _REFERENCE.sub(reference, template)


def label_join(vector: Vector, texts: Sequence[str]) -> Vector:
    """Set a label to the values of others. The texts are: label to set, separator, labels to read."""
    target, separator, *sources = texts
    joined: Vector = []
    for labels, value in vector:
        values = dict(labels)
        text = separator.join(values.get(source, "") for source in sources)
        joined.append((with_label(labels, target, text), value))
    return distinct(joined)


def labels_of_absence(node: Node) -> Labels:
    """Return the labels that a selector asks for by equality, once each: what the missing series would have."""
    known: dict[str, str] = {}
    seen: set[str] = set()
    for matcher in node.matchers if isinstance(node, Selector) else ():
        if matcher.label == NAME_LABEL:
            continue
        if matcher.operator == "=" and matcher.label not in seen:
            known[matcher.label] = matcher.value
            seen.add(matcher.label)
        else:
            known.pop(matcher.label, None)
    return tuple(sorted((label, value) for label, value in known.items() if value))
