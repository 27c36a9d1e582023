"""Faults on the wire between real processes: garbage, greedy subscribers, a second trainer, a killed one."""

import itertools
import random
import re
import socket
import statistics
from pathlib import Path

import pytest
from sidecar_process import ROOT, Place, Sidecar, Trainer, wait_for

from shared.endpoint import EndpointClaim, EndpointError
from shared.wire import Record, Snap, Step
from sidecar.journal import Journal
from sidecar.sinks.wandb_spool import Spool

INTERVAL_S = 0.1
MEBIBYTE = 2**20


def num_descriptors(pid: int) -> int:
    """How many files a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident_bytes(pid: int, field: str = "VmRSS") -> int:
    """The memory of a process; VmHWM is the most it ever had."""
    [kibibytes] = re.findall(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(kibibytes) * 1024


def received(sidecar: Sidecar) -> int:
    """How many records the sidecar has."""
    number: int = sidecar.status()["records"]["received"]
    return number


def wait_for_more(sidecar: Sidecar, num_records: int) -> None:
    """Wait until it has received so many more."""
    before = received(sidecar)
    wait_for(lambda: received(sidecar) >= before + num_records, "more records")


def sessions_of(place: Place) -> list[tuple[str, list[Record]]]:
    """Every session in the journal and its records."""
    journal = Journal(place.state_dir / "journal.sqlite")
    found = [(s.name, list(journal.records(s, 0, s.next_seq))) for s in journal.sessions()]
    journal.close()
    return found


def assert_complete(place: Place, sidecar: Sidecar, trainer: Trainer) -> list[Record]:
    """End the run: every record is in the journal once, and nothing was lost. Returns the records."""
    num_steps, num_records = trainer.stop()
    wait_for(lambda: sidecar.status()["trainers"] == [], "the trainer to leave")
    assert sidecar.status()["records"]["lost"] == 0
    sidecar.terminate()
    [(_, records)] = sessions_of(place)
    assert [record.seq for record in records] == list(range(num_records))
    assert [record.step for record in records if isinstance(record, Step)] == list(range(1, num_steps + 1))
    return records


def assert_steady(records: list[Record], longest_s: float = 2.0) -> None:
    """The telemetry thread kept its interval: on the whole, and also at its worst on a busy machine."""
    times_s = [record.monotonic_s for record in records if isinstance(record, Snap)]
    intervals_s = [after - before for before, after in itertools.pairwise(times_s)]
    assert statistics.median(intervals_s) < 1.2 * INTERVAL_S
    assert max(intervals_s) < longest_s


def garbage(chance: random.Random) -> bytes:
    """Bytes as nobody should send them: noise, old protocols, half a greeting, endless lengths."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)
    return chance.choice(
        (
            b"",
            chance.randbytes(chance.randrange(1, 400)),
            b"\x01\x00" + b"\x06\x00\x01hello" * 20,
            b"\xff" + b"\xff" * 8 + chance.randbytes(100),
            greeting[: chance.randrange(len(greeting))],
            greeting + chance.randbytes(chance.randrange(200)),
        )
    )


def test_two_thousand_garbage_connections(place: Place) -> None:
    """1. 2,000 connections send rubbish; 200 of them stay open. Result: steady pace, descriptors freed, no loss."""
    trainer = place.trainer(steps_per_second=150.0)
    sidecar = place.sidecar()
    path = str(place.runtime_dir / "run-0.sock")
    wait_for_more(sidecar, 100)
    descriptors, resident = num_descriptors(trainer.pid), resident_bytes(trainer.pid)
    chance = random.Random(1)
    staying = []
    for number in range(2_000):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        connection.send(garbage(chance), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        if number % 10:
            connection.close()
        else:
            staying.append(connection)
    # Also those that never leave are let go, once they have had time to say who they are.
    wait_for(lambda: num_descriptors(trainer.pid) <= descriptors, "the descriptors to be freed")
    for connection in staying:
        connection.close()
    wait_for_more(sidecar, 100)

    assert resident_bytes(trainer.pid) < resident + 8 * MEBIBYTE
    assert_steady(assert_complete(place, sidecar, trainer))


@pytest.mark.parametrize("habit", ["replays", "topics"])
def test_a_greedy_subscriber_starves_nobody(place: Place, habit: str) -> None:
    """1. A process subscribes without end and reads nothing. 2. The sidecar is killed, and comes back to a gap.

    Result: the gap is repaired, snapshots keep their interval, and the trainer's memory stays within its bound.
    """
    trainer = place.trainer(steps_per_second=150.0)
    sidecar = place.sidecar()
    wait_for_more(sidecar, 200)
    resident = resident_bytes(trainer.pid)
    path = str(place.runtime_dir / "run-0.sock")
    script = str(ROOT / "tests/hostile_subscriber.py")
    hostile = place.popen(script, path, f"run-{trainer.pid}", habit)
    wait_for_more(sidecar, 100)
    sidecar.kill()
    sidecar = place.sidecar()
    wait_for(lambda: sidecar.status()["trainers"][0]["records_behind"] == 0, "the gap to be repaired", 15)
    wait_for_more(sidecar, 200)

    assert hostile.poll() is None
    hostile.kill()
    assert resident_bytes(trainer.pid, "VmHWM") < resident + 16 * MEBIBYTE
    assert_steady(assert_complete(place, sidecar, trainer))
    assert f"process {hostile.pid} subscribes to too much and was disconnected" in trainer.output


@pytest.mark.parametrize("is_watched", [True, False])
def test_killed_trainer_starts_again_beside_its_leftovers(place: Place, *, is_watched: bool) -> None:
    """1. A trainer is killed -9, watched or not, and leaves its socket and lock. 2. The same run starts again.

    Result: two sessions, each complete up to what was received; the old one's series end; no row twice.
    """
    first = place.trainer(steps_per_second=150.0)
    sidecar = place.sidecar()
    wait_for_more(sidecar, 200)
    if not is_watched:
        sidecar.kill()
    first.process.kill()
    first.process.wait()
    assert {path.suffix for path in place.runtime_dir.iterdir()} == {".sock", ".lock"}
    second = place.trainer(steps_per_second=150.0)
    if not is_watched:
        sidecar = place.sidecar()
    wait_for(lambda: [t["pid"] for t in sidecar.status()["trainers"]] == [second.pid], "the new session")
    wait_for_more(sidecar, 200)
    page = sidecar.metrics()
    num_steps, num_records = second.stop()
    wait_for(lambda: sidecar.status()["trainers"] == [], "the trainer to leave")
    sidecar.terminate()

    assert [name for name in page if name.startswith("dflash_run_info")] == [
        f'dflash_run_info{{pid="{second.pid}",rank="0",run_id="run",session="run-{second.pid}",world_size="1"}}'
    ]
    assert page["dflash_trainer_up"] == 1.0
    assert page["dflash_steps_total"] <= num_steps
    (_, before), (_, after) = sessions_of(place)
    assert [record.seq for record in before] == list(range(len(before)))
    assert [record.seq for record in after] == list(range(num_records))
    assert row_steps(place) == [record.step for record in (*before, *after) if isinstance(record, Step)]


def row_steps(place: Place) -> list[object]:
    """The steps of the run that have W&B rows, in order; the rows are numbered densely."""
    spool = Spool(place.state_dir / "spool.sqlite", read_only=True)
    rows = spool.rows("run", 0, 10**6)
    spool.close()
    assert [number for number, _ in rows] == list(range(len(rows)))
    return [row["train/step"] for _, row in rows if "train/step" in row]


def test_a_path_has_one_trainer(place: Place) -> None:
    """A second trainer on the same path gets one error that names the owner and the remedy; the first goes on."""
    trainer = place.trainer(steps_per_second=150.0)
    sidecar = place.sidecar()
    wait_for_more(sidecar, 50)

    output, _ = place.trainer().process.communicate(timeout=30)
    wait_for_more(sidecar, 50)

    path = place.runtime_dir / "run-0.sock"
    remedy = "give this run another run.id or stop the other one"
    assert output == f"{path} is in use by process {trainer.pid}; {remedy}\n"
    assert_steady(assert_complete(place, sidecar, trainer))


def test_leftovers_of_others_are_named(place: Place) -> None:
    """A socket file without an owner is taken over; a lock that cannot be taken is named with the remedy."""
    (place.runtime_dir / "run-0.sock").touch()
    (place.runtime_dir / "run-0.lock").write_text("whatever")
    trainer = place.trainer(steps_per_second=150.0)
    sidecar = place.sidecar()
    wait_for_more(sidecar, 20)
    assert_complete(place, sidecar, trainer)
    (place.runtime_dir / "run-0.lock").unlink()
    (place.runtime_dir / "run-0.lock").mkdir()

    with pytest.raises(EndpointError, match=r"run-0\.lock: Is a directory; .* give this run another run\.id"):
        EndpointClaim(place.runtime_dir / "run-0.sock").__enter__()
