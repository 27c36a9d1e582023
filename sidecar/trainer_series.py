"""Turn a trainer's records into samples, under the names and labels that its schema gives them.

The layout of a session never changes, so names, labels and cell ranges are worked out once per session; a snapshot is
then one pass over them. A histogram's cells count per bucket, Prometheus wants running totals: each of its points is
the sum of a range of cells that begins at the first bucket.
"""

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from shared.catalogue import SHOWN_EVENTS, STEP_FAMILIES
from shared.schema import Family, Schema
from shared.wire import Event, Record, Snap, Step
from sidecar.samples import ExportedFamily, Labels, Sample, labels_of

FAMILY_OF_STEP_SAMPLE = {family.name: family for family in STEP_FAMILIES}


class _Point(NamedTuple):
    family: Family
    name: str
    labels: Labels
    first_cell: int
    end_cell: int


class TrainerSeries:
    """The series of one session.

    Args:
        schema: what its snapshots mean.
        labels: put on every series beside its own.
    """

    def __init__(self, schema: Schema, labels: Labels) -> None:
        self._labels = labels
        self._points = tuple(_points(schema, labels))
        self._families = {point.name: point.family for point in self._points} | FAMILY_OF_STEP_SAMPLE

    def samples(self, record: Record) -> list[Sample]:
        """Every sample that a record holds, at the record's own time."""
        if isinstance(record, Snap):
            values = array("d", record.values)
            return [
                Sample(name, labels, record.time_s, values[first] if end == first + 1 else sum(values[first:end]))
                for _, name, labels, first, end in self._points
            ]
        pairs = _step_values(record) if isinstance(record, Step) else _event_values(record)
        return [Sample(name, tuple(sorted((*own, *self._labels))), record.time_s, value) for name, own, value in pairs]

    def families(self, samples: Iterable[Sample]) -> list[ExportedFamily]:
        """Group samples of this session into families as /metrics shows them."""
        grouped: dict[str, list[tuple[str, Labels, float]]] = {}
        families = {}
        for sample in samples:
            family = self._families[sample.name]
            families[family.name] = family
            grouped.setdefault(family.name, []).append((sample.name, sample.labels, sample.value))
        return [
            ExportedFamily(name=name, kind=families[name].kind, help=families[name].help, points=tuple(points))
            for name, points in grouped.items()
        ]


def _points(schema: Schema, labels: Labels) -> Iterator[_Point]:
    for cell, family, pairs in schema.layout():
        own = labels_of(**{**pairs, **dict(labels)})
        if family.kind != "histogram":
            yield _Point(family, family.name, own, cell, cell + 1)
            continue
        end = cell + len(family.buckets) + 1
        for index, bound in enumerate((*family.buckets, float("inf"))):
            le = "+Inf" if bound == float("inf") else str(bound)
            yield _Point(family, f"{family.name}_bucket", labels_of(le=le, **dict(own)), cell, cell + index + 1)
        yield _Point(family, f"{family.name}_sum", own, end, end + 1)
        yield _Point(family, f"{family.name}_count", own, cell, end)


def _step_values(step: Step) -> Iterator[tuple[str, Labels, float]]:
    yield "dflash_step", (), float(step.step)
    yield "dflash_loss", (), step.loss
    for position, accuracy in enumerate(step.accuracy_ratio, start=1):
        yield "dflash_accuracy_ratio", labels_of(position=str(position)), accuracy
    yield "dflash_accept_length_simulated", (), step.accept_length_simulated
    yield "dflash_grad_norm", (), step.grad_norm
    yield "dflash_learning_rate", (), step.learning_rate


def _event_values(event: Event) -> Iterator[tuple[str, Labels, float]]:
    if event.kind in SHOWN_EVENTS:
        yield "dflash_event_timestamp_seconds", labels_of(kind=event.kind), event.time_s
    accept_length = event.detail.get("accept_length")
    if event.kind == "evaluation" and isinstance(accept_length, float | int):
        yield "dflash_accept_length", (), float(accept_length)
