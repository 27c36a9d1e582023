"""The journal file: exactly once, in order, bounded, and robust against what happens to files."""

import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest
from trainer_frames import START_S, hello, snap

from shared.wire import encode
from sidecar.database import DamageError, DatabaseError, mark_damaged
from sidecar.journal import Journal
from sidecar.samples import Sample
from sidecar.stored import Batch, LostRange, StoredSession


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

    assert (again.next_seq, again.end_seq, again.labels) == (7, 9, (("run", "x"),))
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


@pytest.mark.parametrize("where", ["on the disk", "in memory"])
def test_readings_without_any_trainer_are_bounded_too(tmp_path: Path, where: str) -> None:
    """A sidecar that waits for months keeps its newest readings, and no more bytes than it may."""
    journal = Journal(tmp_path / "journal.sqlite" if where == "on the disk" else None)
    for second in range(3000):
        noise = Random(second).random
        readings = [Sample("dflash_gpu_power_watts", (("uuid", str(k)),), START_S + second, noise()) for k in range(40)]
        journal.append_samples(readings)
    while journal.trim(0.0, 400_000):
        pass
    kept = [sample.time_s for sample in journal.samples_between(0.0, 2**40)]
    journal.close()

    assert 100 <= len(set(kept)) <= 1500
    assert kept[-1] == START_S + 2999


def test_file_of_a_newer_version_is_refused_untouched(tmp_path: Path) -> None:
    """A newer file is an error that names both versions, and stays as it is."""
    path = tmp_path / "journal.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE kept (x)")
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = path.read_bytes()

    with pytest.raises(DatabaseError, match=r"journal\.sqlite has version 99, this sidecar knows 2"):
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


def test_damaged_record_is_one_loss_and_the_rest_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bytes flipped inside records cost those records, counted once however often they are read, and no other."""
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    store(journal, opened(journal).number, range(1_000))
    with sqlite3.connect(path) as connection:
        for seq in (10, 700):
            body = bytearray(
                connection.execute("SELECT body FROM records WHERE key & 1048575 = ?", (seq,)).fetchone()[0]
            )
            body[len(body) // 2] ^= 0x40
            connection.execute("UPDATE records SET body = ? WHERE key & 1048575 = ?", (bytes(body), seq))
    connection.close()

    with caplog.at_level(logging.ERROR):
        first, second = read(journal), read(journal)

    assert first == second == [seq for seq in range(1_000) if seq not in {10, 700}]
    assert (journal.counts() or {})["lost", "damaged"] == 2
    assert [(lost.first_seq, lost.end_seq) for lost in journal.lost_ranges()] == [(10, 11), (700, 701)]
    assert caplog.text.count("it is damaged in the journal") == 2
    journal.close()


def test_records_that_vanished_are_damage(journal: Journal) -> None:
    """A hole or a missing beginning or end, neither trimmed nor declared lost, is not passed over in silence."""
    session = opened(journal)
    store(journal, session.number, range(100))
    journal.trim(START_S + 20.0, 2**40)
    journal.append(Batch(lost=[LostRange("s1", 40, 45, "ring_overrun")]))
    with journal._writer:
        journal._writer.execute("DELETE FROM records WHERE key & 1048575 BETWEEN 40 AND 44")
    assert read(journal) == [*range(20, 40), *range(45, 100)]

    for first, last in ((20, 22), (70, 72), (95, 99)):
        with journal._writer:
            journal._writer.execute(f"DELETE FROM records WHERE key & 1048575 BETWEEN {first} AND {last}")
        with pytest.raises(DamageError, match=f"records {first} to {last} of session s1 are gone"):
            read(journal)
        store(journal, session.number, range(first, last + 1))
        store(journal, session.number, range(100, 100))


def test_clock_that_went_back_makes_no_hole(journal: Journal) -> None:
    """Trimming by age drops a beginning only, although later records bear older times."""
    session = opened(journal)
    times = [START_S + seq if seq < 50 else START_S + seq - 1_000.0 for seq in range(100)]
    records = [msgspec.structs.replace(snap(seq), time_s=time_s) for seq, time_s in enumerate(times)]
    stored = [(session.number, record, encode(record)) for record in records]
    journal.append(Batch(records=stored, positions={session.number: (100, 100)}))
    while journal.trim(START_S + 20.0, 2**40):
        pass

    assert read(journal) == list(range(20, 100))


def test_file_of_an_older_version_is_brought_up_to_date(tmp_path: Path) -> None:
    """A journal of version 1 keeps its sessions, records and counts, and takes new ones."""
    path = tmp_path / "journal.sqlite"
    old = sqlite3.connect(path)
    old.executescript(VERSION_1)
    session = encode(hello(next_seq=2))
    old.execute("INSERT INTO sessions VALUES (1, 's1', '/run/a.sock', '[]', ?, 2, 2, NULL, NULL, 0)", (session,))
    keys = [((1 << 40) + seq, START_S + seq, "snap", encode(snap(seq))) for seq in range(2)]
    old.executemany("INSERT INTO records VALUES (?, ?, ?, ?)", keys)
    old.execute("INSERT INTO counts VALUES ('received', '', 2)")
    old.commit()
    old.close()

    journal = Journal(path)
    store(journal, 1, range(4))

    assert read(journal) == [0, 1, 2, 3]
    assert journal.counts() == {("received", ""): 2}
    journal.close()
    Journal(path).close()


VERSION_1 = """
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY, session TEXT NOT NULL UNIQUE, endpoint TEXT NOT NULL, labels TEXT NOT NULL,
    hello BLOB NOT NULL, next_seq INTEGER NOT NULL DEFAULT 0, end_seq INTEGER NOT NULL DEFAULT 0, ended_s REAL,
    exit_code INTEGER,
    consumed INTEGER NOT NULL DEFAULT 0);
CREATE TABLE records (key INTEGER PRIMARY KEY, time_s REAL NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL);
CREATE INDEX events ON records (key) WHERE kind = 'event';
CREATE TABLE lost (session TEXT NOT NULL, first_seq INTEGER NOT NULL, end_seq INTEGER NOT NULL, reason TEXT NOT NULL);
CREATE TABLE samples (id INTEGER PRIMARY KEY, time_s REAL NOT NULL, body BLOB NOT NULL);
CREATE INDEX samples_time ON samples (time_s);
CREATE TABLE counts (name TEXT NOT NULL, label TEXT NOT NULL, value INTEGER NOT NULL, PRIMARY KEY (name, label));
PRAGMA user_version = 1;
"""
