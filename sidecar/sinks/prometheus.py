"""Shows the newest result to Prometheus, in the text format or as OpenMetrics.

A page is made of one immutable `Result`: a scrape never sees a mixture of two evaluations, and a series that
is gone from the result is gone from the page. Values are the trainer's own totals, so restarting the sidecar resets no
counter. A family that would spoil the page (an invalid name, a duplicate, a value that is no number) is left out and
counted, and so is a single series whose total is none (NaN, negative); the rest is served.
"""

import functools
import re
import threading
from collections.abc import Callable, Iterable

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder

from sidecar.samples import HISTOGRAM_SUFFIXES, ExportedFamily, Labels, Result, occupied_names
from sidecar.sinks.text_format import MAX_KNOWN_LABELS, write

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_KINDS = ("counter", "gauge", "histogram")
Families = Iterable[ExportedFamily]


class PrometheusSink:
    """Holds the newest result and renders it. Safe from any thread.

    Args:
        prepare: makes the families of a page of those of a result, when somebody asks for it.
    """

    def __init__(self, prepare: Callable[[Families], Families] = lambda families: families) -> None:
        self._prepare = prepare
        self._result = Result(time_s=0.0)
        self._lock = threading.Lock()
        self._page_of: Result | None = None
        self._families: tuple[ExportedFamily, ...] = ()
        self._pages: dict[bool, bytes] = {}
        self._num_dropped = 0
        self._problems: tuple[str, ...] = ()

    @property
    def num_dropped(self) -> int:
        """Families left out of rendered results since the start."""
        return self._num_dropped

    @property
    def problems(self) -> tuple[str, ...]:
        """Why families were left out of the result rendered last."""
        return self._problems

    def publish(self, result: Result) -> None:
        """Make `result` what the next scrape sees."""
        self._result = result

    def render(self, accept_header: str) -> tuple[bytes, str]:
        """The page and its content type; results are rendered once per format, however many ask."""
        content_type = _content_type(accept_header)
        as_openmetrics = content_type.startswith("application/openmetrics-text")
        result = self._result
        with self._lock:
            if result is not self._page_of:
                self._families, problems = _usable(self._prepare(result.families))
                self._problems = tuple(problems)
                self._num_dropped += len(problems)
                self._page_of, self._pages = result, {}
            if as_openmetrics not in self._pages:
                self._pages[as_openmetrics] = write(self._families, as_openmetrics=as_openmetrics)
            return self._pages[as_openmetrics], content_type


def _content_type(accept_header: str) -> str:
    """What is answered: the newest that the client takes."""
    try:
        _, content_type = choose_encoder(accept_header)
    except TypeError:  # a version that is no number, as in `text/plain; version=latest`
        return CONTENT_TYPE_PLAIN_0_0_4
    # Our names need no escaping, but these two schemes change some of them all the same.
    return re.sub("escaping=(dots|values)", "escaping=underscores", content_type)


def _usable(families: Families) -> tuple[tuple[ExportedFamily, ...], list[str]]:
    """Keep what can be shown, and say why the rest cannot."""
    usable: list[ExportedFamily] = []
    problems: list[str] = []
    names: set[str] = set()
    for family in families:
        occupied = occupied_names(family.name, family.kind)
        problem = _family_problem(family) or _points_problem(family, _sample_names(family))
        if not problem and names.intersection(occupied):
            problem = "declared twice, or its samples collide with those of another family"
        if problem:
            problems.append(f"{family.name}: {problem}")
            continue
        names.update(occupied)
        broken = _broken_series(family)
        problems += [f"{family.name}{dict(series)}: not a total that only rises" for series in broken]
        if broken:
            points = tuple(point for point in family.points if _series_of(point[1], family.kind) not in broken)
            family = msgspec.structs.replace(family, points=points)  # noqa: PLW2901 - the same without what is broken
        usable.append(family)
    return tuple(usable), problems


def _broken_series(family: ExportedFamily) -> set[Labels]:
    """Series of a counter or histogram that OpenMetrics cannot express: readers would refuse the whole page."""
    broken: set[Labels] = set()
    below: dict[Labels, float] = {}
    for name, labels, value in family.points if family.kind != "gauge" else ():
        series = _series_of(labels, family.kind)
        is_count = family.kind == "histogram" and not name.endswith("_sum")
        # Also false for NaN. Counts are whole numbers, and each bucket holds what the one below it holds.
        if not value >= 0 or (is_count and not (float(value).is_integer() and value >= below.get(series, 0.0))):
            broken.add(series)
        if is_count:
            below[series] = value
    return broken


def _series_of(labels: Labels, kind: str) -> Labels:
    """The labels without that of the bucket."""
    return tuple(pair for pair in labels if pair[0] != "le") if kind == "histogram" else labels


def _sample_names(family: ExportedFamily) -> tuple[str, ...]:
    if family.kind == "histogram":
        return tuple(family.name + suffix for suffix in HISTOGRAM_SUFFIXES)
    return (family.name,)


def _family_problem(family: ExportedFamily) -> str:
    if not _is_name(family.name):
        return "not a metric name"
    if family.kind not in _KINDS:
        return f"unknown kind {family.kind!r}"
    if family.kind == "counter" and not family.name.endswith("_total"):
        return "the name of a counter must end in _total"
    return "" if _is_text(family.help) else "help is not text"


def _points_problem(family: ExportedFamily, sample_names: tuple[str, ...]) -> str:
    seen: set[tuple[str, Labels]] = set()
    for name, labels, value in family.points:
        if name not in sample_names:
            return f"a {family.kind} has no sample {name!r}"
        if not isinstance(value, int | float):
            return f"value {value!r} is not a number"
        if not _are_usable(labels):
            return f"labels {labels!r} are not usable"
        if name.endswith("_bucket") and family.kind == "histogram" and "le" not in dict(labels):
            return "a bucket has no le"
        if (name, labels) in seen:
            return f"{name}{dict(labels)} is there twice"
        seen.add((name, labels))
    return ""


@functools.lru_cache(maxsize=MAX_KNOWN_LABELS)
def _are_usable(labels: Labels) -> bool:
    return all(_is_name(label) and _is_text(text) for label, text in labels) and len(dict(labels)) == len(labels)


def _is_name(text: object) -> bool:
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def _is_text(text: object) -> bool:
    """Whether it can be written as UTF-8: a lone surrogate cannot."""
    if not isinstance(text, str):
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
