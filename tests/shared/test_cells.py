"""Cells and the schema that explains them."""

import struct

import pytest

from shared.catalogue import STEP_FAMILIES, TRAINER_FAMILIES
from shared.cells import Cells
from shared.schema import Family, Schema, Series


def test_snapshot_follows_the_layout() -> None:
    """Each series is found in the snapshot where the schema says."""
    cells = Cells(TRAINER_FAMILIES)
    cells.counter("dflash_tokens_total", role="drafter", worker="0", kind="real").add(7)
    histogram = cells.histogram("dflash_sequence_length_tokens")
    cells.gauge("dflash_queue_depth", queue="hidden").set(3)
    for length in (32, 33, 100_000):
        histogram.observe(length)
    values = struct.unpack(f"<{cells.schema().num_cells}d", cells.snapshot())

    layout = {family.name: (cell, family) for cell, family, _ in cells.schema().layout()}
    first, family = layout["dflash_sequence_length_tokens"]
    buckets = values[first : first + family.cells_per_series]

    assert values[layout["dflash_tokens_total"][0]] == 7
    assert values[layout["dflash_queue_depth"][0]] == 3
    assert (buckets[0], buckets[1], buckets[-2], buckets[-1]) == (1, 1, 1, 100_065)


def test_a_cell_has_one_writer() -> None:
    """Declaring the same series twice is refused, as are wrong labels and kinds."""
    cells = Cells(TRAINER_FAMILIES)
    cells.counter("dflash_steps_total")

    with pytest.raises(ValueError, match="declared twice"):
        cells.counter("dflash_steps_total")
    with pytest.raises(ValueError, match="is a gauge"):
        cells.counter("dflash_queue_depth", queue="hidden")
    with pytest.raises(ValueError, match="with labels"):
        cells.gauge("dflash_queue_depth", que="hidden")


def test_schema_refuses_contradictions() -> None:
    """A schema from the wire that points outside itself never becomes an object."""
    family = Family(name="x", kind="gauge", help="", labels=("a",))

    with pytest.raises(ValueError, match="refers to family 1 of 1"):
        Schema(families=(family,), series=(Series(family=1, labels=("v",)),))
    with pytest.raises(ValueError, match="0 label values for 1 labels"):
        Schema(families=(family,), series=(Series(family=0),))


def test_catalogue_names_follow_the_conventions() -> None:
    """Counters end in _total, nothing else does; names are unique and prefixed; every family has a help text."""
    families = (*TRAINER_FAMILIES, *STEP_FAMILIES)

    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.name.startswith("dflash_")
        assert family.name.endswith("_total") == (family.kind == "counter")
        assert family.help.endswith(".")
