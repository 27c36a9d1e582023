"""The intake about trainers elsewhere: nobody can look whether they live, so silence is an end that can be undone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from trainer_frames import event, frame, hello, snap

from shared.wire import Event, Hello, Snap
from sidecar.intake import OWED_S, SETTLE_INTERVAL_S, Intake
from sidecar.journal import Journal

REMOTE, ELSEWHERE, LOCAL = "tcp://10.0.0.7:9478", "tcp://10.0.0.8:9478", "/run/a.sock"
SILENCE_LIMIT_S = 10.0


class Bench:
    """An intake over a real journal, with a clock; whoever is on this machine lives."""

    def __init__(self, path: Path) -> None:
        self.journal = Journal(path)
        self.now_s = 100.0
        self.restart()

    def restart(self) -> None:
        """Begin again from the journal, as a new process would, an hour after the last record."""
        self.intake = Intake(self.journal, "n", self.now_s, wall_s=self.wall_s, owner_pid=lambda _path: 1)

    def wall_s(self) -> float:
        """Unix time."""
        return 1_700_003_500.0 + self.now_s

    def take(self, *messages: Hello | Snap | Event, endpoint: str = REMOTE) -> None:
        """Hand over frames as they came from an endpoint."""
        for message in messages:
            self.intake.take(endpoint, frame(message), self.now_s)

    def pass_time(self, seconds: float) -> list[bytes]:
        """Let time pass and turn; returns what is asked for."""
        self.now_s += seconds
        return [change.topic for change in self.intake.turn(self.now_s) if change.wanted]

    def live(self) -> list[str]:
        """Sessions that have not ended."""
        return [session.name for session in self.journal.sessions() if session.ended_s is None]

    def lost(self) -> dict[str, int]:
        """Committed counts of lost records by reason."""
        return {label: value for (name, label), value in self.journal.counts().items() if name == "lost"}

    def seqs(self, index: int = 0) -> list[int]:
        """Sequence numbers that the pipeline may read of a session."""
        session = self.journal.sessions()[index]
        return [record.seq for record in self.journal.records(session, 0, session.next_seq)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """An intake with an empty journal."""
    bench = Bench(tmp_path / "journal.sqlite")
    yield bench
    bench.journal.close()


def test_silence_ends_it_and_its_next_hello_reopens_it_with_what_it_owed(bench: Bench) -> None:
    """Down after its limit, not before; nothing is lost by it, and the gap is asked for again when it is back."""
    bench.take(hello(next_seq=4), snap(0), snap(3))
    bench.pass_time(SILENCE_LIMIT_S - 1.0)
    before = bench.live()
    bench.pass_time(2.0)
    after = bench.live()
    bench.take(hello(next_seq=4))
    asked = bench.pass_time(1.0)
    bench.take(snap(1), snap(2))
    bench.pass_time(1.0)

    assert (before, after, bench.live()) == (["s1"], [], ["s1"])
    assert [topic.split(b"/")[:4] for topic in asked] == [[b"replay", b"s1", b"1", b"3"]]
    assert (bench.seqs(), bench.lost()) == ([0, 1, 2, 3], {})


@pytest.mark.parametrize("endpoint", [LOCAL, ELSEWHERE])
def test_another_trainer_ends_only_what_has_been_silent(bench: Bench, endpoint: str) -> None:
    """A hello from anywhere else never ends a trainer that was heard lately, and costs a silent one no records."""
    bench.take(hello(next_seq=2), snap(0))
    bench.take(hello("s2", run_id="two"), endpoint=endpoint)
    bench.pass_time(1.0)
    beside = bench.live()
    bench.now_s += SILENCE_LIMIT_S
    bench.take(hello("s3", run_id="three"), endpoint="/run/c.sock")
    bench.pass_time(0.5)

    assert beside == ["s1", "s2"]
    assert "s1" not in bench.live()
    assert bench.lost() == {}


@pytest.mark.parametrize("restarted", [False, True])
def test_successor_at_the_same_address_settles_what_is_lost(bench: Bench, restarted: bool) -> None:
    """When another session answers at its address a silent one cannot return: its gap is lost, the rest is kept."""
    bench.take(hello(next_seq=6), snap(0), snap(3), snap(5))
    bench.pass_time(SILENCE_LIMIT_S + 1.0)
    before = bench.lost()
    if restarted:
        bench.restart()
    bench.take(hello("s2"))
    bench.pass_time(1.0)

    assert (before, bench.lost()) == ({}, {"trainer_gone": 3})
    assert bench.live() == ["s2"]
    assert bench.seqs() == [0, 3, 5]


@pytest.mark.parametrize("restarted", [False, True])
def test_what_nobody_has_brought_for_a_day_is_lost(bench: Bench, restarted: bool) -> None:
    """It was killed and nothing follows at its address: its gap is counted, once, also if it comes back after all."""
    bench.take(hello(next_seq=6), snap(0), snap(3), snap(5))
    bench.pass_time(SILENCE_LIMIT_S + 1.0)
    bench.pass_time(OWED_S - 60.0)
    before = bench.lost()
    if restarted:
        bench.restart()
    bench.pass_time(SETTLE_INTERVAL_S + 60.0)
    settled = (bench.lost(), bench.live(), bench.seqs())
    bench.pass_time(SETTLE_INTERVAL_S + 60.0)
    bench.take(hello(next_seq=7), snap(1), snap(6))
    bench.pass_time(1.0)

    assert (before, settled) == ({}, ({"trainer_gone": 3}, [], [0, 3, 5]))
    assert (bench.lost(), bench.live(), bench.seqs()) == ({"trainer_gone": 3}, ["s1"], [0, 3, 5, 6])


def test_goodbye_and_silence_are_an_end_for_good(bench: Bench) -> None:
    """Who said goodbye and is silent for the limit will not bring what is missing: it is lost and counted."""
    bench.take(hello(next_seq=3), snap(0), event(2, "goodbye", exit_code=0))
    bench.pass_time(SILENCE_LIMIT_S - 1.0)
    before = bench.live()
    bench.pass_time(2.0)

    assert (before, bench.live(), bench.lost()) == (["s1"], [], {"trainer_gone": 1})


def test_after_a_restart_of_the_sidecar_it_has_its_time_again(bench: Bench) -> None:
    """A sidecar that was away for long gives a trainer elsewhere its whole limit to be heard before it is down."""
    bench.take(hello(), snap(0))
    bench.pass_time(1.0)
    bench.restart()
    bench.pass_time(SILENCE_LIMIT_S - 1.0)
    soon = bench.live()
    bench.pass_time(2.0)

    assert (soon, bench.live()) == (["s1"], [])
