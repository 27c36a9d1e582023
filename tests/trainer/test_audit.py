"""The audit trail: what a trainer published, written down by itself."""

from pathlib import Path

import pytest
from audit import assert_journal_equals, audited
from sidecar_process import Place, wait_for

from trainer.audit import AuditTrail


def test_every_record_is_written_down_before_it_is_sent(tmp_path: Path) -> None:
    """While a trainer publishes, whatever a sidecar has stored is in the file already; at the end they are equal."""
    place = Place(tmp_path)
    try:
        trainer = place.trainer()
        sidecar = place.sidecar()
        wait_for(lambda: sidecar.status()["records"]["received"] > 50, "records")
        num_received = sidecar.status()["records"]["received"]
        num_written = len((tmp_path / "run.audit").read_bytes().splitlines())
        num_steps, _ = trainer.stop()
        wait_for(lambda: sidecar.status()["trainers"] == [], "the trainer to leave")
        sidecar.terminate()
    finally:
        place.close()

    assert num_written >= num_received
    assert [fields[4] for fields in audited(tmp_path / "run.audit", "step")] == list(range(1, num_steps + 1))
    assert [fields[4] for fields in audited(tmp_path / "run.audit", "event")] == ["goodbye"]
    assert_journal_equals(place.state_dir / "journal.sqlite", tmp_path / "run.audit")


def test_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    """The error names the setting, the path and the remedy."""
    with pytest.raises(
        ValueError, match=r"telemetry.audit_path=.*absent/x: No such file or directory; leave it empty, it is for tests"
    ):
        AuditTrail(tmp_path / "absent" / "x")
