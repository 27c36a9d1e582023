"""The intake without sockets: frames in, journal and subscriptions out."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from trainer_frames import event, frame, hello, snap, step

from shared.schema import Schema
from shared.wire import Hello, ReplayChunk, ReplayRequest, Scalar, Snap, Step, encode
from sidecar.intake import Intake
from sidecar.journal import Journal

HERE, THERE = "/run/a.sock", "/run/b.sock"


class Bench:
    """An intake over a real journal, with a clock and a table of live owners that the test sets."""

    def __init__(self, path: Path) -> None:
        self.journal = Journal(path)
        self.now_s = 100.0
        self.owners: dict[str, int] = {HERE: 1, THERE: 2}
        self.restart()

    def restart(self) -> None:
        """Begin again from the journal, as a new process would."""
        self.intake = Intake(
            self.journal, "n", self.now_s, wall_s=lambda: 1_700_000_000.0, owner_pid=lambda p: self.owners.get(str(p))
        )

    def take(self, *messages: Hello | Snap | Step, endpoint: str = HERE) -> None:
        """Hand over frames as they came from an endpoint."""
        for message in messages:
            self.intake.take(endpoint, frame(message), self.now_s)

    def pass_time(self, seconds: float) -> list[tuple[str, bytes, bool]]:
        """Let time pass and turn."""
        self.now_s += seconds
        return [tuple(change) for change in self.intake.turn(self.now_s)]

    def seqs(self, index: int = 0) -> list[int]:
        """Sequence numbers that the pipeline may read of a session."""
        session = self.journal.sessions()[index]
        return [record.seq for record in self.journal.records(session, 0, session.next_seq)]

    def rejected(self) -> dict[str, int]:
        """Committed counts of rejected frames by reason."""
        return {label: value for (name, label), value in (self.journal.counts() or {}).items() if name == "rejected"}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """An intake with an empty journal."""
    bench = Bench(tmp_path / "journal.sqlite")
    yield bench
    bench.journal.close()


def answer(request: ReplayRequest, *records: Snap | Step, done: bool = True) -> list[bytes]:
    """A replay chunk on the topic of its request."""
    bodies = tuple(encode(record) for record in records)
    chunk = ReplayChunk(session=request.session, first_seq=request.first, bodies=bodies, done=done)
    return [request.topic, encode(chunk)]


def test_records_are_stored_once_and_in_order(bench: Bench) -> None:
    """Duplicates are ignored, and the pipeline sees each record once."""
    bench.take(hello(), snap(0), step(1, 1), snap(0), snap(2), step(1, 1))
    bench.pass_time(1.0)

    assert bench.seqs() == [0, 1, 2]
    assert bench.journal.counts() == {("received", ""): 3}


def test_gap_holds_the_watermark_until_replay_fills_it(bench: Bench) -> None:
    """Records beyond a gap wait; the replay is a subscription, and its answer releases them."""
    bench.take(hello(), snap(0), snap(3))
    changes = bench.pass_time(0.1)
    assert bench.seqs() == [0]
    request = ReplayRequest(session="s1", first=1, end=3, nonce="n-0")
    assert changes == [(HERE, request.topic, True)]

    bench.intake.take(HERE, answer(request, snap(1), snap(2)), bench.now_s)
    after = bench.pass_time(0.2)

    assert bench.seqs() == [0, 1, 2, 3]
    assert after == [(HERE, request.topic, False)]
    assert bench.journal.counts() == {("received", ""): 4, ("replayed", ""): 2}


def test_restart_asks_only_for_what_the_journal_lacks(bench: Bench) -> None:
    """After a restart the journal says what is here, and the hello what is missing."""
    bench.take(hello(), snap(0), snap(1))
    bench.pass_time(1.0)
    bench.restart()

    bench.take(hello(next_seq=5))
    changes = bench.pass_time(0.1)

    assert changes == [(HERE, ReplayRequest(session="s1", first=2, end=5, nonce="n-0").topic, True)]


def test_overrun_of_the_ring_is_counted_exactly(bench: Bench) -> None:
    """What the trainer no longer holds is lost, by number and range; what is here is not."""
    bench.take(hello(), snap(0), snap(5))
    bench.take(hello(first_seq=8, next_seq=10))
    bench.pass_time(1.0)

    assert [(r.first_seq, r.end_seq, r.reason) for r in bench.journal.lost_ranges()] == [
        (1, 5, "ring_overrun"),
        (6, 8, "ring_overrun"),
    ]
    assert bench.journal.counts()["lost", "ring_overrun"] == 6
    assert bench.seqs() == [0, 5]


def test_trainer_that_dies_with_a_gap_costs_it(bench: Bench) -> None:
    """A session without a live owner ends after its silence, and its open gap is lost with it."""
    bench.take(hello(), snap(0), snap(3))
    del bench.owners[HERE]
    bench.pass_time(9.0)
    assert bench.journal.sessions()[0].ended_s is None

    bench.pass_time(2.0)

    session = bench.journal.sessions()[0]
    assert (session.ended_s, session.exit_code, session.next_seq) == (1_700_000_000.0, None, 4)
    assert bench.journal.counts()["lost", "trainer_gone"] == 2


def test_silent_trainer_with_a_live_owner_stays(bench: Bench) -> None:
    """A stopped process still owns its socket, so its session goes on."""
    bench.take(hello(), snap(0))
    bench.pass_time(1000.0)

    assert bench.journal.sessions()[0].ended_s is None


def test_goodbye_ends_the_session_with_its_exit_code(bench: Bench) -> None:
    """A goodbye and everything before it ends a session at once, also while the socket still has an owner."""
    bench.take(hello(), snap(0), event(1, "goodbye", exit_code=3), snap(2))
    bench.pass_time(1.0)

    assert [(s.exit_code, s.next_seq) for s in bench.journal.sessions() if s.ended_s] == [(3, 3)]


def test_records_before_the_hello_are_kept(bench: Bench) -> None:
    """Records that overtake the hello are not lost and not rejected."""
    bench.take(snap(0), snap(1), hello(next_seq=2))
    bench.pass_time(1.0)

    assert bench.seqs() == [0, 1]
    assert bench.rejected() == {}


def test_new_session_on_an_endpoint_ends_the_old_one(bench: Bench) -> None:
    """A trainer that was killed and started again takes the plain labels over."""
    bench.take(hello("s1"), snap(0))
    bench.take(hello("s2", run_id="next"), snap(0, session="s2"))
    bench.pass_time(1.0)

    assert [(s.name, s.labels, s.ended_s is None) for s in bench.journal.sessions()] == [
        ("s1", (), False),
        ("s2", (), True),
    ]


def test_concurrent_runs_and_ranks_are_told_apart_by_labels(bench: Bench) -> None:
    """The first run has plain labels, a later one its run id, each rank of several its rank; restarts keep that."""
    bench.take(hello("s1", run_id="a"))
    bench.take(hello("s2", run_id="b", rank=1, world_size=2), endpoint=THERE)
    bench.pass_time(1.0)
    bench.restart()
    bench.take(hello("s2", run_id="b", rank=1, world_size=2), endpoint=THERE)

    assert [s.labels for s in bench.journal.sessions()] == [(), (("rank", "1"), ("run", "b"))]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([b"snap"], "parts"),
        ([b"snap", b"\xc1"], "malformed"),
        ([b"snap", b"\x90"], "invalid"),
        ([b"step", encode(snap(1))], "topic"),
        ([b"snap", encode(snap(1, (1.0,)))], "values_length"),
        ([b"snap", encode(msgspec.structs.replace(snap(1), time_s=float("nan")))], "time"),
        ([b"snap", encode(msgspec.structs.replace(snap(1), seq=2**52))], "invalid"),
        ([b"hello", encode(msgspec.structs.replace(hello(), version=9))], "version"),
        ([b"hello", encode(msgspec.structs.replace(hello(), schema_digest="00"))], "schema_digest"),
        ([b"hello", encode(hello(first_seq=3, next_seq=2))], "invalid"),
        ([b"snap", b"x" * (4 * 1024 * 1024 + 1)], "oversized"),
    ],
)
def test_unusable_frames_are_counted_by_reason(bench: Bench, parts: list[bytes], reason: str) -> None:
    """A frame that cannot be used changes nothing but the count of its reason."""
    bench.take(hello(), snap(0))
    bench.intake.take(HERE, parts, bench.now_s)
    bench.pass_time(1.0)

    assert bench.rejected() == {reason: 1}
    assert bench.seqs() == [0]


def test_other_endpoints_cannot_speak_for_a_session(bench: Bench) -> None:
    """Records, hellos and schemas of a session are believed only from the endpoint it lives at."""
    bench.take(hello(), snap(0))
    other = Schema(families=hello().schema.families[:1], series=hello().schema.series[:1])
    bench.take(hello(next_seq=50), snap(1), endpoint=THERE)
    bench.take(msgspec.structs.replace(hello(), schema=other, schema_digest=other.digest))
    bench.pass_time(1.0)

    assert bench.rejected() == {"session_conflict": 2, "schema_changed": 1}
    assert bench.seqs() == [0]


def test_strangers_without_a_hello_are_bounded(bench: Bench) -> None:
    """Only so many records are kept for a session that never introduced itself."""
    bench.take(*(snap(seq, session="ghost") for seq in range(150)))
    bench.pass_time(1.0)

    assert bench.rejected() == {"no_hello": 50}


def test_failed_commit_is_a_gap_that_replay_fills(bench: Bench) -> None:
    """A journal that cannot be written ends the intake; the next one asks for what was not stored."""
    bench.take(hello(), snap(0))
    bench.pass_time(1.0)
    bench.journal._writer.execute("PRAGMA query_only = ON")
    bench.take(snap(1))
    with pytest.raises(sqlite3.OperationalError):
        bench.pass_time(1.0)
    assert bench.seqs() == [0]

    bench.journal._writer.execute("PRAGMA query_only = OFF")
    bench.restart()
    bench.take(hello(next_seq=2))
    changes = bench.pass_time(1.0)
    request = ReplayRequest(session="s1", first=1, end=2, nonce="n-0")
    bench.intake.take(HERE, answer(request, snap(1)), bench.now_s)
    bench.pass_time(1.0)

    assert changes == [(HERE, request.topic, True)]
    assert bench.seqs() == [0, 1]
    assert bench.journal.counts() == {("received", ""): 2, ("replayed", ""): 1}


def test_journal_in_memory_begins_where_the_ring_does() -> None:
    """While the disk is out of order, what the ring no longer holds is no loss: the file may have it."""
    journal = Journal(None, {("lost", "ring_overrun"): 7})
    intake = Intake(journal, "n", 0.0, owner_pid=lambda _path: 1)
    intake.take(HERE, frame(hello(first_seq=40, next_seq=42)), 0.0)
    [(_, topic, wanted)] = intake.turn(1.0)
    request = ReplayRequest.parse(topic)
    intake.take(HERE, answer(request, snap(40), snap(41)), 1.0)
    intake.turn(2.0)

    [session] = journal.sessions()
    assert (wanted, request.first, request.end) == (True, 40, 42)
    assert [record.seq for record in journal.records(session, 0, session.next_seq)] == [40, 41]
    assert journal.counts() == {("lost", "ring_overrun"): 7}
    journal.close()


def test_a_record_nobody_can_read_is_passed_over(bench: Bench) -> None:
    """Replayed again it would be no better: it counts as lost, and the good ones around it are released."""
    bench.take(hello(), snap(0), snap(6))
    bench.pass_time(0.1)
    request = ReplayRequest(session="s1", first=1, end=6, nonce="n-0")
    bodies = (encode(snap(1)), b"\xc1", encode(snap(3, (1.0,))), encode(snap(4, session="s2")), encode(snap(5)))
    chunk = ReplayChunk(session="s1", first_seq=1, bodies=bodies, done=True)
    bench.intake.take(HERE, [request.topic, encode(chunk)], bench.now_s)
    changes = bench.pass_time(1.0)

    assert bench.seqs() == [0, 1, 5, 6]
    assert [(r.first_seq, r.end_seq, r.reason) for r in bench.journal.lost_ranges()] == [(2, 5, "unreadable")]
    assert bench.rejected() == {"malformed": 1, "values_length": 1, "session_conflict": 1}
    assert changes == [(HERE, request.topic, False)]


def test_a_chunk_that_begins_elsewhere_declares_nothing_lost(bench: Bench) -> None:
    """Only the next missing record of the open request can be passed over, so that a lost chunk is asked for again."""
    bench.take(hello(), snap(0), snap(6))
    bench.pass_time(0.1)
    request = ReplayRequest(session="s1", first=1, end=6, nonce="n-0")
    for first_seq in (0, 3, 2**53 - 1):
        chunk = ReplayChunk(session="s1", first_seq=first_seq, bodies=(b"\xc1",), done=False)
        bench.intake.take(HERE, [request.topic, encode(chunk)], bench.now_s)
    bench.pass_time(1.0)

    assert bench.journal.lost_ranges() == []
    assert bench.seqs() == [0]


@pytest.mark.parametrize("exit_code", [2**64 - 1, 2**63, -(2**63), "1", None, 1.5])
def test_an_exit_code_that_is_none_is_unknown(bench: Bench, exit_code: Scalar) -> None:
    """A goodbye with a number that no process can return still ends the session."""
    bench.take(hello(), event(0, "goodbye", exit_code=exit_code))
    bench.pass_time(1.0)

    [session] = bench.journal.sessions()
    assert (session.ended_s is not None, session.exit_code) == (True, None)


def test_the_name_of_an_ended_session_is_not_taken_up(bench: Bench) -> None:
    """A process that reuses a session's name, as one with the same pid in a container may, is not taken for it."""
    other = Schema(families=hello().schema.families[:1], series=hello().schema.series[:1])
    bench.take(hello(), snap(0), event(1, "goodbye", exit_code=0))
    bench.pass_time(1.0)
    bench.take(msgspec.structs.replace(hello(), start_time_s=hello().start_time_s + 60.0))
    bench.take(msgspec.structs.replace(hello(), schema=other, schema_digest=other.digest))
    bench.pass_time(1.0)

    assert bench.rejected() == {"session_conflict": 1, "schema_changed": 1}
    assert [session.ended_s is not None for session in bench.journal.sessions()] == [True]


def test_one_part_of_a_run_is_one_trainer(bench: Bench) -> None:
    """Two live sessions of the same run and rank would share every series: the second is refused."""
    bench.take(hello("s1"), snap(0))
    bench.take(hello("s2"), endpoint=THERE)
    bench.take(hello("s3", rank=1, world_size=1), endpoint=THERE)
    bench.pass_time(1.0)

    assert bench.rejected() == {"session_conflict": 1, "invalid": 1}
    assert [session.name for session in bench.journal.sessions()] == ["s1"]
