"""The generated reference."""

from pathlib import Path

from sidecar.reference import reference

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "metrics.md"


def test_committed_reference_is_current() -> None:
    """docs/metrics.md is what the tables say today; `make docs` renews it."""
    assert DOCUMENT.read_text().splitlines() == list(reference())
