"""The journal file: exactly once, in order, bounded, and robust against what happens to files."""

import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainer_frames import START_S, hello, snap

from shared.wire import encode
from sidecar.database import DatabaseError, mark_damaged
from sidecar.journal import Batch, Journal, LostRange, StoredSession
from sidecar.samples import Sample


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """An empty journal."""
    journal = Journal(tmp_path / "journal.sqlite")
    yield journal
    journal.close()


def opened(journal: Journal, session: str = "s1") -> StoredSession:
    """A session that has said hello."""
    return journal.open_session(hello(session), encode(hello(session)), "/run/a.sock", ())


def store(journal: Journal, number: int, seqs: range, *, ended: bool = False) -> None:
    """Store snapshots, one a second, as a complete prefix."""
    batch = Batch(
        records=[(number, snap(seq), encode(snap(seq))) for seq in seqs],
        positions={number: (seqs.stop, seqs.stop)},
        ended=[(START_S + seqs.stop, 0, number)] if ended else [],
    )
    journal.append(batch)


def read(journal: Journal, index: int = 0) -> list[int]:
    """Every readable sequence number of a session."""
    session = journal.sessions()[index]
    return [record.seq for record in journal.records(session, 0, session.next_seq)]


def test_records_come_back_in_order_across_batches_and_sessions(journal: Journal) -> None:
    """Reading is in seq order, over the internal batch size, and never crosses into another session."""
    first, second = opened(journal, "s1"), opened(journal, "s2")
    store(journal, second.number, range(3))
    store(journal, first.number, range(1_200))

    assert read(journal, 0) == list(range(1_200))
    assert read(journal, 1) == [0, 1, 2]


def test_storing_twice_keeps_one(journal: Journal) -> None:
    """A record that is already stored is ignored."""
    session = opened(journal)
    store(journal, session.number, range(3))
    store(journal, session.number, range(4))

    assert read(journal) == [0, 1, 2, 3]


def test_everything_survives_reopening(tmp_path: Path) -> None:
    """Sessions with labels and watermark, counts, lost ranges and samples are there after a restart."""
    journal = Journal(tmp_path / "j")
    session = journal.open_session(hello(), encode(hello()), "/run/a.sock", (("run", "x"),))
    lost = LostRange("s1", 1, 3, "ring_overrun")
    journal.append(Batch(positions={session.number: (7, 8)}, lost=[lost], counts={("lost", "ring_overrun"): 2}))
    journal.append(Batch(counts={("lost", "ring_overrun"): 1}))
    sample = Sample("dflash_host_cpu_seconds_total", (("mode", "user"),), 5.0, 1.5)
    journal.append_samples([sample])
    journal.close()

    journal = Journal(tmp_path / "j")
    again = journal.open_session(hello(next_seq=9), encode(hello(next_seq=9)), "/run/a.sock", ())

    assert (again.next_seq, again.end_seq, again.labels) == (7, 8, (("run", "x"),))
    assert journal.counts() == {("lost", "ring_overrun"): 3}
    assert journal.lost_ranges() == [lost]
    assert list(journal.samples_between(0.0, 10.0)) == [sample]
    journal.close()


def test_first_seq_since_finds_the_start_of_a_window(journal: Journal) -> None:
    """The search by time lands on the first record at or after it, also when the beginning was trimmed."""
    session = opened(journal)
    store(journal, session.number, range(500))
    session = journal.sessions()[0]
    assert journal.first_seq_since(session, START_S + 123.0) == 123
    assert journal.first_seq_since(session, START_S + 122.5) == 123
    assert journal.first_seq_since(session, START_S + 1000.0) == 500

    journal.trim(START_S + 200.0, 2**40)

    assert next(iter(journal.records(session, journal.first_seq_since(session, 0.0), 201))).seq == 200


def test_trim_by_age_drops_old_records_and_forgotten_sessions(journal: Journal) -> None:
    """Records older than the bound go; a session goes with its last record, once it ended and was consumed."""
    old, new = opened(journal, "s1"), opened(journal, "s2")
    store(journal, old.number, range(10), ended=True)
    store(journal, new.number, range(100))
    journal.mark_consumed(old.number)
    while journal.trim(START_S + 50.0, 2**40):
        pass

    assert [session.name for session in journal.sessions()] == ["s2"]
    assert read(journal) == list(range(50, 100))


def test_trim_by_size_drops_the_oldest_until_it_fits(journal: Journal, tmp_path: Path) -> None:
    """Over its size the journal drops the oldest records, and the file shrinks."""
    session = opened(journal)
    store(journal, session.number, range(20_000))
    journal._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    before = (tmp_path / "journal.sqlite").stat().st_size
    while journal.trim(0.0, 1_000_000):
        pass
    journal._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    kept = read(journal)
    assert kept == list(range(kept[0], 20_000))
    assert 0 < len(kept) < 20_000
    assert (tmp_path / "journal.sqlite").stat().st_size < before


def test_file_of_a_newer_version_is_refused_untouched(tmp_path: Path) -> None:
    """A newer file is an error that names both versions, and stays as it is."""
    path = tmp_path / "journal.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE kept (x)")
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = path.read_bytes()

    with pytest.raises(DatabaseError, match=r"journal\.sqlite has version 99, this sidecar knows 1"):
        Journal(path)

    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", ["header", "middle", "marker"])
def test_damaged_file_is_moved_aside(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged journal is kept under another name, and a new one works."""
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    store(journal, opened(journal).number, range(1000))
    journal.close()
    content = path.read_bytes()
    if damage == "header":
        path.write_bytes(b"not a database, sorry" + content[21:])
    elif damage == "middle":
        path.write_bytes(content[:100] + b"\xff" * (len(content) - 100))
    else:
        mark_damaged(path)

    with caplog.at_level(logging.ERROR):
        journal = Journal(path)

    assert journal.sessions() == []
    assert len(list(tmp_path.glob("journal.sqlite.corrupt-*[0-9]"))) == 1
    assert "is damaged" in caplog.text
    opened(journal)
    journal.close()
    journal = Journal(path)
    assert len(journal.sessions()) == 1
    journal.close()


def test_directory_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    """A path that cannot be opened names itself and the remedy."""
    with pytest.raises(DatabaseError, match="give another --state-dir"):
        Journal(tmp_path / "absent" / "journal.sqlite")
