"""Compare what a trainer wrote down for itself with what arrived: in the journal, and in W&B."""

import json
from pathlib import Path
from typing import Any

import msgspec
from fake_wandb import Run

from sidecar.journal import Journal


def audited(path: Path, kind: str) -> list[list[Any]]:
    """The records of one kind as lists of their fields, the tag first, in the order they were published."""
    return [fields for line in path.read_bytes().split(b"\n")[:-1] if (fields := json.loads(line))[0] == kind]


def assert_journal_equals(journal_path: Path, *audits: Path) -> None:
    """Each session has every record that its trainer wrote down, once, in order and unchanged, and no other."""
    expected: dict[str, list[bytes]] = {}
    for path in audits:
        for line in path.read_bytes().splitlines():
            expected.setdefault(json.loads(line)[1], []).append(line)
    journal = Journal(journal_path)
    arrived = {
        stored.name: [msgspec.json.encode(record) for record in journal.records(stored, 0, stored.next_seq)]
        for stored in journal.sessions()
    }
    journal.close()

    assert arrived.keys() == expected.keys()
    for session, lines in expected.items():
        assert len(arrived[session]) == len(lines), session
        assert arrived[session] == lines


def assert_wandb_equals(run: Run, audit: Path) -> None:
    """The run has a row for every step, once, in order and with the same values, in one dense sequence."""
    rows = run.history
    assert [row["_step"] for row in rows] == list(range(len(rows)))
    assert run.conflicts == []
    arrived = [(row["train/step"], row["train/loss"], row["_timestamp"]) for row in rows if "train/step" in row]
    assert arrived == [(fields[4], fields[5], fields[3]) for fields in audited(audit, "step")]
