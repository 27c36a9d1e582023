"""Values of the past as an OpenMetrics file, from which promtool makes blocks for a Prometheus.

OpenMetrics wants each series in one piece, the values come in order of time: so they are kept until the end, 16 bytes
each.
"""

import math
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path

from sidecar.definitions import Definition
from sidecar.history import Point
from sidecar.samples import Labels

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class OpenMetricsFile:
    """Collects points and writes them.

    Args:
        labels: put on every series, such as the job and instance under which Prometheus scrapes the sidecar.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._definitions: dict[str, Definition] = {}
        self._series: dict[str, dict[Labels, tuple[array[float], array[float]]]] = {}

    def add(self, points: Iterable[Point]) -> None:
        """Take in points in order of time."""
        for definition, labels, time_s, value in points:
            self._definitions[definition.name] = definition
            series = self._series.setdefault(definition.name, {})
            times_s, values = series.setdefault(labels, (array("d"), array("d")))
            if not times_s or time_s > times_s[-1]:
                times_s.append(time_s)
                values.append(value)

    def counts(self) -> dict[str, tuple[int, int]]:
        """Number of series and of values by metric."""
        return {
            name: (len(series), sum(len(times_s) for times_s, _ in series.values()))
            for name, series in self._series.items()
        }

    def write(self, path: Path) -> None:
        """Write the file; raises OSError."""
        with path.open("w", encoding="utf-8") as file:
            for name, series in self._series.items():
                definition = self._definitions[name]
                family = name.removesuffix("_total") if definition.kind == "counter" else name
                file.write(
                    f"# TYPE {family} {definition.kind}\n# HELP {family} {definition.help.translate(_ESCAPES)}\n"
                )
                for labels, (times_s, values) in series.items():
                    head = name + self._braces(labels)
                    file.writelines(f"{head} {_number(v)} {t:.6f}\n" for t, v in zip(times_s, values, strict=True))
            file.write("# EOF\n")

    def _braces(self, labels: Labels) -> str:
        pairs = {**self._labels, **dict(labels)}
        return "{" + ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in sorted(pairs.items())) + "}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return ("+Inf" if value > 0 else "-Inf") if math.isinf(value) else repr(value)
