"""What definitions may refer to: what this version knows, and what the trainers in the journal say they have."""

from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from trainer_frames import hello

from shared.schema import Family, Schema, Series
from shared.wire import Hello, encode
from sidecar.app import main
from sidecar.catalogue import CATALOGUE, RawSeries, catalogue_of, stored_catalogue
from sidecar.journal import Journal
from sidecar.station import JOURNAL_NAME

NEWER = Schema(
    families=(
        Family("dflash_experts_total", "counter", "Experts.", ("expert",)),
        Family("dflash_queue_depth", "gauge", "Depth.", ("queue", "tier")),
    ),
    series=(Series(0, ("1",)),),
)
TEXT = """
[[metric]]
name = "dflash_experts_per_second"
help = "Experts."
type = "gauge"
expr = 'sum by (expert) (rate(dflash_experts_total[30s])) + on () group_left () sum(dflash_queue_depth{tier="a"})'
"""


def store(state_dir: Path, message: Hello) -> None:
    """Let a journal know a trainer."""
    with closing(Journal(state_dir / JOURNAL_NAME)) as journal:
        journal.open_session(message, encode(message), "/run/x.sock", ())


def newer_trainer() -> Hello:
    """A trainer with a family and a label that this version does not know."""
    return msgspec.structs.replace(hello(), schema=NEWER, schema_digest=NEWER.digest)


def test_families_of_a_trainer_in_the_journal_are_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A metric over what only a newer trainer has is accepted beside its journal, and refused where there is none."""
    file = tmp_path / "m.toml"
    file.write_text(TEXT)
    store(tmp_path, newer_trainer())

    beside = main(["check", str(file), "--state-dir", str(tmp_path)])
    alone = main(["check", str(file), "--state-dir", str(tmp_path / "none")])
    problems = capsys.readouterr().err

    assert (beside, alone) == (0, 1)
    assert f"{file}:6:31: dflash_experts_per_second: unknown series dflash_experts_total" in problems
    assert "the label tier, which dflash_queue_depth does not have" in problems
    assert len(problems.splitlines()) == 2


def test_what_this_version_knows_stays_known_beside_a_trainer_with_less(tmp_path: Path) -> None:
    """An older trainer takes nothing away: its families come first, the labels of both count."""
    store(tmp_path, newer_trainer())
    catalogue = stored_catalogue(tmp_path / JOURNAL_NAME)

    assert set(CATALOGUE) < set(catalogue)
    assert RawSeries(catalogue).series["dflash_queue_depth"].labels == {"queue", "tier", "run", "rank"}


def test_unusable_journal_leaves_what_this_version_knows(tmp_path: Path) -> None:
    """Whatever is wrong with the journal, another part tells; the checks go on."""
    (tmp_path / "journal.sqlite").write_bytes(b"no database at all" * 100)

    assert stored_catalogue(tmp_path / "journal.sqlite") == CATALOGUE
    assert stored_catalogue(tmp_path / "none.sqlite") == CATALOGUE


def test_names_that_a_page_needs_are_taken() -> None:
    """A counter takes its name without `_total` too, a histogram the names of all its samples."""
    raw = RawSeries(
        catalogue_of([Family("a_total", "counter", "A."), Family("b", "histogram", "B.", (), (1.0,))]),
    )

    assert raw.occupied == {"a_total", "a", "b", "b_bucket", "b_sum", "b_count"}
    assert set(raw.series) == {"a_total", "b_bucket", "b_sum", "b_count"}
    assert "le" in raw.series["b_bucket"].labels
    assert "le" not in raw.series["b_sum"].labels
