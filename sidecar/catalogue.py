"""What definitions may refer to: the raw families, with their kinds and labels, and the series they expose."""

import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from shared.catalogue import STEP_FAMILIES, TRAINER_FAMILIES
from shared.schema import Family, Kind
from sidecar.collectors.catalogue import COLLECTOR_FAMILIES
from sidecar.database import DatabaseError
from sidecar.exposition import LIVENESS_FAMILIES, SIDECAR_FAMILIES
from sidecar.journal import Journal
from sidecar.samples import HISTOGRAM_SUFFIXES, RUN_LABEL, occupied_names

Catalogue = Mapping[str, Family]
"""Raw families by name."""
ADDED_LABELS = frozenset({RUN_LABEL, "rank"})
"""What the sidecar puts on a trainer's series when there are several."""


class Exposed(NamedTuple):
    """What is known of the series of one name."""

    kind: Kind
    labels: frozenset[str]


def catalogue_of(*tables: Iterable[Family]) -> dict[str, Family]:
    """Every family of some tables; where one is in several, the first says of what kind it is, and all its labels."""
    catalogue: dict[str, Family] = {}
    for table in tables:
        for family in table:
            known = catalogue.setdefault(family.name, family)
            if more := tuple(label for label in family.labels if label not in known.labels):
                catalogue[family.name] = Family(known.name, known.kind, known.help, (*known.labels, *more))
    return catalogue


CATALOGUE = catalogue_of(TRAINER_FAMILIES, STEP_FAMILIES, COLLECTOR_FAMILIES, LIVENESS_FAMILIES, SIDECAR_FAMILIES)
"""Every raw family that this version knows."""


def stored_catalogue(journal_path: Path) -> Catalogue:
    """The raw families of the trainers in a journal, which may be older or newer than this version, and those it knows.

    Trainers that have left count too, so that a restart of the sidecar between two runs refuses nothing.
    """
    try:
        with closing(Journal(journal_path, read_only=True)) as journal:
            schemas = [stored.hello.schema for stored in reversed(journal.sessions())]
    except (DatabaseError, sqlite3.Error):  # there is none yet, or another part will tell what is wrong with it
        return CATALOGUE
    return catalogue_of(*(schema.families for schema in schemas), CATALOGUE.values())


class RawSeries:
    """What a catalogue means for the names in definitions and expressions.

    Attributes:
        series: what is known of each series name.
        histograms: names of histograms, which have no series of that name.
        occupied: names that no definition may take.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self.series: dict[str, Exposed] = {}
        families = catalogue.values()
        self.histograms = frozenset(family.name for family in families if family.kind == "histogram")
        self.occupied = frozenset(name for family in families for name in occupied_names(family.name, family.kind))
        for family in families:
            labels = frozenset(family.labels) | ADDED_LABELS
            if family.kind == "histogram":
                names = [family.name + suffix for suffix in HISTOGRAM_SUFFIXES]
                self.series |= dict.fromkeys(names, Exposed("counter", labels))
                self.series[f"{family.name}_bucket"] = Exposed("counter", labels | {"le"})
            else:
                self.series[family.name] = Exposed(family.kind, labels)
