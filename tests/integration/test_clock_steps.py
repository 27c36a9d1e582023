"""The wall clock of the machine, or of one process, is stepped by hours in mid-run."""

import itertools
import struct
from pathlib import Path

import pytest
from sidecar_process import ROOT, Place, Sidecar, wait_for

from shared.wire import Step
from sidecar.journal import Journal
from sidecar.sinks.wandb_run import Row
from sidecar.sinks.wandb_spool import Spool

HOUR_S = 3600.0
STEPS_PER_SECOND = 20.0
STEPS_S = (3 * HOUR_S, -5 * HOUR_S, 0.0)
"""Offsets one after the other: forward by three hours, back by eight, forward by five."""
CUMULATIVE = ("_total", "_bucket", "_count", "_sum")


class Clock:
    """A wall clock for processes that are started with its environment."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.set(0.0)

    def set(self, offset_s: float) -> None:
        """Step to this far from the true time."""
        with self._path.open("r+b" if self._path.exists() else "wb") as file:
            file.write(struct.pack("d", offset_s))

    @property
    def environ(self) -> dict[str, str]:
        """What makes a process use it."""
        return {"CLOCK_OFFSET_FILE": str(self._path), "PYTHONPATH": f"{ROOT / 'tests/stepped_clock'}:{ROOT}"}


def rows_of(place: Place) -> list[Row]:
    """The W&B rows of the run, which are numbered densely."""
    spool = Spool(place.state_dir / "spool.sqlite", read_only=True)
    numbered = spool.rows("run", 0, 10**6)
    spool.close()
    assert [number for number, _ in numbered] == list(range(len(numbered)))
    return [row for _, row in numbered]


def num_telemetry_rows(place: Place) -> int:
    """How many rows came from snapshots."""
    return sum("train/step" not in row for row in rows_of(place))


def watch(sidecar: Sidecar, place: Place, pages: list[dict[str, float]]) -> None:
    """Look at the pages until there are two more telemetry rows and a rate of steps."""
    wanted = num_telemetry_rows(place) + 2

    def goes_on() -> bool:
        pages.append(sidecar.metrics())
        return num_telemetry_rows(place) >= wanted and "dflash_steps_per_second" in pages[-1]

    wait_for(goes_on, "rows and rates to go on", 20)


def assert_nothing_fell(pages: list[dict[str, float]]) -> None:
    """No total of the trainer or of the sidecar about records is ever less than before."""
    for before, after in itertools.pairwise(pages):
        totals = {name: value for name, value in before.items() if name.split("{")[0].endswith(CUMULATIVE)}
        ours = {name: value for name, value in totals.items() if not name.startswith(("dflash_host", "dflash_process"))}
        assert {name: (value, after.get(name)) for name, value in ours.items() if after.get(name, -1.0) < value} == {}


def assert_whole(place: Place, sidecar: Sidecar, counts: tuple[int, int]) -> None:
    """One session, ended by its goodbye; every record is in the journal and every step in a row, once and in order."""
    num_steps, num_records = counts
    wait_for(lambda: sidecar.status()["trainers"] == [], "the trainer to leave")
    assert sidecar.status()["records"]["lost"] == 0
    sidecar.terminate()
    journal = Journal(place.state_dir / "journal.sqlite")
    [session] = journal.sessions()
    records = list(journal.records(session, 0, session.next_seq))
    journal.close()
    assert session.exit_code == 0
    assert [record.seq for record in records] == list(range(num_records))
    assert [record.step for record in records if isinstance(record, Step)] == list(range(1, num_steps + 1))
    assert [row["train/step"] for row in rows_of(place) if "train/step" in row] == list(range(1, num_steps + 1))


def test_machine_whose_clock_is_stepped(place: Place, tmp_path: Path) -> None:
    """Forward by three hours, back by eight, forward by five; at the earliest time the sidecar is killed and restarted.

    Result: nothing is lost, no total falls, rates come back within seconds and never spike, and rows go on.
    """
    clock = Clock(tmp_path / "clock")
    place.environ |= clock.environ
    trainer = place.trainer(steps_per_second=STEPS_PER_SECOND)
    sidecar = place.sidecar("--set=wandb.interval_s=0.5")
    pages: list[dict[str, float]] = []
    watch(sidecar, place, pages)
    for offset_s in STEPS_S:
        clock.set(offset_s)
        watch(sidecar, place, pages)
        assert [t["pid"] for t in sidecar.status()["trainers"]] == [trainer.pid]
        if offset_s < 0.0:
            sidecar.kill()
            sidecar = place.sidecar("--set=wandb.interval_s=0.5")
            watch(sidecar, place, pages)

    assert_nothing_fell(pages)
    assert max(page.get("dflash_steps_per_second", 0.0) for page in pages) < 2 * STEPS_PER_SECOND
    assert_whole(place, sidecar, trainer.stop())


@pytest.mark.parametrize("who", ["trainer", "sidecar"])
def test_one_clock_is_stepped(place: Place, tmp_path: Path, who: str) -> None:
    """When the clock of only one side is stepped, records, totals, rows and the session are as if nothing had been."""
    clock = Clock(tmp_path / "clock")
    honest = dict(place.environ)
    place.environ = honest | (clock.environ if who == "trainer" else {})
    trainer = place.trainer(steps_per_second=STEPS_PER_SECOND)
    place.environ = honest | (clock.environ if who == "sidecar" else {})
    sidecar = place.sidecar("--set=wandb.interval_s=0.5")
    pages = [sidecar.metrics()]
    for offset_s in (0.0, *STEPS_S):
        clock.set(offset_s)
        wanted = num_telemetry_rows(place) + 2
        wait_for(lambda wanted=wanted: num_telemetry_rows(place) >= wanted, "telemetry rows", 20)
        pages.append(sidecar.metrics())
        assert [t["pid"] for t in sidecar.status()["trainers"]] == [trainer.pid]

    assert_nothing_fell(pages)
    assert_whole(place, sidecar, trainer.stop())
