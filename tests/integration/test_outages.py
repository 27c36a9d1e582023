"""The sidecar away for long, killed or stopped: the ring makes good for it, and beyond it the loss is exact."""

import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from audit import assert_journal_equals, audited
from sidecar_process import Place, Sidecar, Trainer, wait_for

from sidecar.journal import Journal

MIB = 1024**2
_LOST = re.compile(r"lost records (\d+) to (\d+) of session (\S+), between (.+) and (.+): ring_overrun")


class Watched:
    """A sidecar that goes away and comes back."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.sidecar = place.sidecar()
        self.output = ""

    @contextmanager
    def away(self, how: str) -> Iterator[None]:
        """Without the sidecar for the length of a block: "killed" and started anew, or "stopped" and woken up."""
        if how == "killed":
            self.output += self.sidecar.kill()
            yield
            self.sidecar = self._place.sidecar()
        else:
            self.sidecar.process.send_signal(signal.SIGSTOP)
            yield
            self.sidecar.process.send_signal(signal.SIGCONT)

    def end(self, trainer: Trainer) -> tuple[int, int]:
        """End the trainer, then the sidecar; returns the number of steps and of records."""
        numbers = trainer.stop()
        wait_for(lambda: self.sidecar.status()["trainers"] == [], "the trainer to leave", 30)
        self.output += self.sidecar.terminate()[1]
        return numbers


def records_of(sidecar: Sidecar) -> dict[str, int]:
    """Its totals."""
    records: dict[str, int] = sidecar.status()["records"]
    return records


def has_all(sidecar: Sidecar, step: int) -> bool:
    """Whether the only trainer has come to a step and owes nothing."""
    return [(t["step"] >= step, t["records_behind"]) for t in sidecar.status()["trainers"]] == [(True, 0)]


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_ten_minutes_of_steps_are_fetched_from_the_ring(place: Place, how: str) -> None:
    """1. The sidecar is away for 3,000 steps, ten minutes at five a second. 2. It returns. Result: nothing is lost."""
    trainer = place.trainer(steps_per_second=500.0)
    watched = Watched(place)
    wait_for(lambda: records_of(watched.sidecar)["received"] > 100, "records")
    before = len(audited(place.audit("run"), "step"))
    memory = psutil.Process(trainer.pid)
    rss_before = memory.memory_info().rss
    with watched.away(how):
        wait_for(lambda: len(audited(place.audit("run"), "step")) > before + 3_000, "3,000 steps", 30)
        rss_after = memory.memory_info().rss
    wait_for(lambda: has_all(watched.sidecar, before + 3_000), "all of it", 20)
    fetched = records_of(watched.sidecar)
    watched.end(trainer)

    assert fetched["lost"] == 0
    assert fetched["replayed"] > (2_900 if how == "killed" else 0)
    assert rss_after - rss_before < 16 * MIB
    assert_journal_equals(place.state_dir / "journal.sqlite", place.audit("run"))


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_what_fell_out_of_the_ring_is_counted_exactly(place: Place, how: str) -> None:
    """Beyond the ring each missing record is in the count and in the log by number and time; totals stay right."""
    began_s = time.time()
    trainer = place.trainer(steps_per_second=2_000.0, ring_bytes=100_000)
    watched = Watched(place)  # on a busy machine it comes too late for the first records
    wait_for(lambda: records_of(watched.sidecar)["received"] > 1_000, "records")
    left_s = time.time()
    with watched.away(how):
        time.sleep(5.0)  # 10,000 steps: five times what ring and both queues hold
        back_s = time.time()
    wait_for(lambda: records_of(watched.sidecar)["lost"] > 0, "the loss to be seen", 20)
    wait_for(lambda: [t["records_behind"] for t in watched.sidecar.status()["trainers"]] == [0], "the rest", 20)
    page, records = watched.sidecar.metrics(), records_of(watched.sidecar)
    num_steps, num_records = watched.end(trainer)

    assert page['dflash_records_lost_total{reason="ring_overrun"}'] == records["lost"]
    assert 0.0 < page["dflash_steps_total"] <= num_steps
    journal = Journal(place.state_dir / "journal.sqlite")
    [session] = journal.sessions()
    arrived = {record.seq for record in journal.records(session, 0, session.next_seq)}
    lost = {seq for gap in journal.lost_ranges() for seq in range(gap.first_seq, gap.end_seq)}
    counts = journal.counts() or {}
    journal.close()
    assert arrived | lost == set(range(num_records))
    assert arrived & lost == set()
    assert (counts["lost", "ring_overrun"], counts["received", ""]) == (len(lost), len(arrived))
    told = _LOST.findall(watched.output)
    assert {seq for first, last, *_ in told for seq in range(int(first), int(last) + 1)} == lost
    for *_, start, end in told:
        assert began_s - 3.0 < clock(start) <= clock(end) < back_s + 3.0
    assert left_s - 3.0 < clock(told[-1][3])


def clock(text: str) -> float:
    """Unix time of a time in the log."""
    return time.mktime(time.strptime(text, "%Y-%m-%d %H:%M:%S"))


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_memory_of_the_trainer_is_bounded(place: Place, how: str) -> None:
    """With nobody to collect, the trainer's memory grows by its ring and one queue, and then no more."""
    trainer = place.trainer(steps_per_second=4_000.0, ring_bytes=2 * MIB)
    watched = Watched(place)
    wait_for(lambda: records_of(watched.sidecar)["received"] > 1_000, "records")
    memory = psutil.Process(trainer.pid)
    grown = []
    with watched.away(how):
        for _ in range(3):
            num_lines = len(place.audit("run").read_bytes().splitlines())
            wait_for(
                lambda n=num_lines: len(place.audit("run").read_bytes().splitlines()) > n + 15_000, "15,000 steps", 30
            )
            grown.append(memory.memory_info().rss / MIB)
    watched.end(trainer)

    assert max(grown) - min(grown) < 4.0, grown
