"""What the command `backfill` does with a file: definitions over the retained past.

The journal is only read, so a sidecar may be running.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from shared.settings import nearest
from sidecar.definitions import Definition, DefinitionSet
from sidecar.history import points, replay
from sidecar.journal import Journal
from sidecar.open_metrics import OpenMetricsFile

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d|w)")
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


class PastError(ValueError):
    """A request about the past that cannot be met; the message is meant for the user."""


def parse_since(text: str | None, now_s: float) -> float:
    """A Unix time from `90m`, `7d`, or a date and time in ISO 8601; None is everything. Raises PastError."""
    if text is None:
        return 0.0
    if match := _DURATION.fullmatch(text):
        return now_s - float(match[1]) * _UNITS_S[match[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise PastError(f"--since {text!r}: expected a duration such as 90m or 7d, or 2026-01-31T12:00") from error


def parse_labels(assignments: Sequence[str]) -> dict[str, str]:
    """Labels from `name=value` arguments; raises PastError."""
    labels = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name):
            raise PastError(f"--label {assignment!r}: expected NAME=VALUE, for example instance=127.0.0.1:9477")
        labels[name] = value
    return labels


def chosen(definitions: DefinitionSet, names: Sequence[str]) -> list[Definition]:
    """The definitions with these names, all when none is named; raises PastError."""
    known = {definition.name: definition for definition in definitions.definitions}
    for name in names:
        if name not in known:
            raise PastError(f"{name}: {definitions.file} does not define it{nearest(name, known)}")
    return [known[name] for name in dict.fromkeys(names)] or list(definitions.definitions)


def export(
    journal_path: Path, definitions: Sequence[Definition], since_s: float, labels: Mapping[str, str], file: Path
) -> list[str]:
    """Write an OpenMetrics file of the past; returns lines that say what is in it, raises PastError."""
    written = OpenMetricsFile(labels)
    journal = Journal(journal_path, read_only=True)
    try:
        written.add(points(replay(journal, definitions, since_s), definitions))
        written.write(file)
    except OSError as error:
        raise PastError(f"{file}: {error.strerror}; give a file that can be written with --openmetrics") from error
    finally:
        journal.close()
    lines = []
    for definition in definitions:
        num_series, num_values = written.counts().get(definition.name, (0, 0))
        lines.append(f"{definition.name}: {num_values} values in {num_series} series")
    return [*lines, f"make blocks of it with: promtool tsdb create-blocks-from openmetrics {file} PROMETHEUS_DATA_DIR"]
