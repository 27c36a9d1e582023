"""What disks do to the sidecar: full, read-only, damaged, cut off in the middle. It serves on, and nothing is lost."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest
from audit import assert_journal_equals
from sidecar_process import Place, Sidecar, wait_for

from sidecar.journal import Journal
from sidecar.sinks.wandb_spool import Spool

DISK_BYTES = 48 * 1024**2
needs_mount = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")


@pytest.fixture
def disk(place: Place) -> Iterator[Path]:
    """The place's state directory, on a small disk of its own."""
    place.state_dir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place.state_dir)], check=True)
    yield place.state_dir
    place.close()
    # Lazily: a sidecar that was stopped gives its lock up a moment before its log.
    subprocess.run(["umount", "--lazy", str(place.state_dir)], check=True)


def fill(disk: Path) -> Path:
    """Take every byte that is left; returns the file that has them."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                return filler


def is_on_disk(sidecar: Sidecar) -> bool:
    """Whether records go to the disk."""
    return sidecar.metrics()["dflash_journal_up"] == 1.0


def assert_goes_on(sidecar: Sidecar) -> None:
    """Check that what is shown is fresh, raw and derived."""
    wait_for(lambda: "dflash_step" in sidecar.metrics(), "a step", 20)
    step = sidecar.metrics()["dflash_step"]
    wait_for(lambda: sidecar.metrics()["dflash_step"] > step + 20, "fresh steps", 20)
    wait_for(lambda: sidecar.metrics().get("dflash_steps_per_second", 0.0) > 0.0, "a rate", 20)


@needs_mount
def test_full_disk(place: Place, disk: Path) -> None:
    """1. Fill the disk. 2. Kill the sidecar and start it again. 3. Start another trainer. 4. Make room.

    Result: served from memory all along, said so, returned to the disk by itself, and every record is in the journal.
    """
    trainer = place.trainer()
    sidecar = place.sidecar()
    wait_for(lambda: sidecar.status()["records"]["received"] > 50, "records")
    filler = fill(disk)
    wait_for(lambda: not is_on_disk(sidecar), "the disk to be given up", 30)
    assert_goes_on(sidecar)
    counts_before = sidecar.status()["records"]
    detail = sidecar.status()["journal"]["detail"]
    sidecar.kill()
    sidecar = place.sidecar()
    assert_goes_on(sidecar)
    assert not is_on_disk(sidecar)
    counts_after = sidecar.status()["records"]
    other = place.trainer("other")
    wait_for(lambda: len(sidecar.status()["trainers"]) == 2, "the other trainer", 20)
    filler.unlink()
    wait_for(lambda: is_on_disk(sidecar), "the return to the disk", 30)
    assert_goes_on_together(sidecar)
    trainer.stop()
    other.stop()
    wait_for(lambda: sidecar.status()["trainers"] == [], "the trainers to leave", 30)
    last = sidecar.status()["records"]
    _, output = sidecar.terminate()

    assert "disk is full" in detail
    assert counts_before == counts_after
    assert last["lost"] == 0
    assert ", fetching what it lacks" in output
    assert_journal_equals(disk / "journal.sqlite", place.audit("run"), place.audit("other"))


def assert_goes_on_together(sidecar: Sidecar) -> None:
    """Check that both trainers' steps are fresh."""
    steps = [trainer["step"] for trainer in sidecar.status()["trainers"]]

    def have_all_moved() -> bool:
        now = [trainer["step"] for trainer in sidecar.status()["trainers"]]
        return len(now) == 2 and all(new > old for old, new in zip(steps, now, strict=True))

    wait_for(have_all_moved, "fresh steps of both", 20)


@needs_mount
def test_start_and_stop_on_a_full_disk(place: Place, disk: Path) -> None:
    """The lock file has no room for who holds it: the sidecar itself says so, and the file once there is room."""
    filler = fill(disk)
    place.environ["DFLASH_WANDB_MODE"] = "off"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    places = ("--state-dir", str(disk), "--listen", f"127.0.0.1:{port}")
    try:
        first = place.command("start", *places)
        held = (disk / "sidecar.lock").read_bytes()
        stopped = place.command("stop", *places)
        second = place.command("start", *places)
        filler.unlink()
        wait_for(lambda: (disk / "sidecar.lock").read_bytes() != b"", "the lock file to tell", 30)
    finally:
        last = place.command("stop", "--state-dir", str(disk))

    said = [done.stdout.split(": pid")[0] for done in (first, stopped, second, last)]
    assert said == ["sidecar started", "sidecar stopped", "sidecar started", "sidecar stopped"]
    assert held == b""


@needs_mount
def test_read_only_disk(place: Place, disk: Path) -> None:
    """A sidecar that finds its directory read-only serves from memory, and returns when it can be written again."""
    trainer = place.trainer()
    sidecar = place.sidecar()
    wait_for(lambda: sidecar.status()["records"]["received"] > 50, "records")
    sidecar.kill()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    sidecar = place.starting_sidecar(port=port)
    sidecar.url = f"http://127.0.0.1:{port}"  # the lock file, which would say so, cannot be written
    wait_for(sidecar.answers, "the sidecar to answer")
    assert_goes_on(sidecar)
    was_on_disk = is_on_disk(sidecar)
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    wait_for(lambda: is_on_disk(sidecar), "the return to the disk", 30)
    trainer.stop()
    wait_for(lambda: sidecar.status()["trainers"] == [], "the trainer to leave", 30)
    sidecar.terminate()

    assert not was_on_disk
    assert_journal_equals(disk / "journal.sqlite", place.audit("run"))


@pytest.mark.parametrize("damage", ["truncated", "zeros", "flipped", "garbage"])
@pytest.mark.parametrize("moment", ["stopped", "running"])
def test_damaged_journal(place: Place, damage: str, moment: str) -> None:
    """1. Damage the files, under a stopped or a running sidecar. 2. Restart it. 3. End the trainer. 4. Restart again.

    Result: it serves on, keeps a damaged file, and has every record again from the trainer, or says which it lacks.
    """
    trainer = place.trainer(steps_per_second=1_000.0)
    sidecar = place.sidecar()
    wait_for(lambda: sidecar.status()["records"]["received"] > 4_000, "records")
    if moment == "stopped":
        sidecar.kill()
        spoil(place.state_dir / "journal.sqlite", damage)
    else:
        spoil(place.state_dir / "journal.sqlite", damage)
        assert_goes_on(sidecar)
        sidecar.kill()
    sidecar = place.sidecar()
    assert_goes_on(sidecar)
    trainer.stop()
    wait_for(lambda: sidecar.status()["trainers"] == [], "the trainer to leave", 30)
    took_s, output = sidecar.terminate()
    sidecar = place.sidecar()
    records = sidecar.status()["records"]
    sidecar.terminate()

    assert took_s < 3.0
    assert "Traceback" not in output
    assert records["lost"] == records["lost_by_reason"]["damaged"]
    assert_only_damaged_records_lack(place, records["lost"])


def spoil(path: Path, damage: str) -> None:
    """Damage a database and its log as a failing disk would."""
    random = Random(7)
    for file in (path, path.with_name(path.name + "-wal")):
        content = bytearray(file.read_bytes())
        half = len(content) // 2
        if damage == "truncated":
            del content[half:]
        elif damage == "zeros":
            content[half:] = bytes(len(content) - half)
        elif damage == "flipped":
            for _ in range(50):
                content[random.randrange(100, len(content))] ^= 1 << random.randrange(8)
        else:
            content[:] = random.randbytes(len(content))
        with file.open("r+b") as stream:
            stream.write(content)
            stream.truncate()


def assert_only_damaged_records_lack(place: Place, num_damaged: int) -> None:
    """Check that what is there is what was published, and that what is not there was counted."""
    expected = set(place.audit("run").read_bytes().splitlines())
    journal = Journal(place.state_dir / "journal.sqlite")
    [session] = journal.sessions()
    arrived = [msgspec.json.encode(record) for record in journal.records(session, 0, session.next_seq)]
    journal.close()
    assert set(arrived) <= expected
    assert len(arrived) == len(expected) - num_damaged


def test_power_cut(place: Place) -> None:
    """Copies of the files taken in the middle of writing hold an unbroken beginning; a sidecar on one goes on there.

    In the end it has every record, and in the spool every step once, although spool and journal were cut separately.
    """
    trainer = place.trainer(steps_per_second=500.0)
    sidecar = place.sidecar()
    copies = []
    for number in range(20):
        wait_for(lambda n=number: sidecar.status()["records"]["received"] > 100 * n, "records")
        copies.append(place.state_dir.with_name(f"copy-{number}"))
        shutil.copytree(place.state_dir, copies[-1])
        time.sleep(0.05)
    sidecar.kill()
    lines = place.audit("run").read_bytes().splitlines()
    lengths = []
    for copy in copies:
        journal = Journal(copy / "journal.sqlite")
        for session in journal.sessions():
            found = [msgspec.json.encode(record) for record in journal.records(session, 0, session.next_seq)]
            assert found == lines[: len(found)]
            lengths.append(len(found))
        journal.close()
    assert lengths[-1] > 1_000

    place.state_dir = copies[10]
    sidecar = place.sidecar()
    num_steps, _ = trainer.stop()
    wait_for(lambda: sidecar.status()["trainers"] == [], "the trainer to leave", 30)
    sidecar.terminate()
    assert_journal_equals(place.state_dir / "journal.sqlite", place.audit("run"))
    spool = Spool(place.state_dir / "spool.sqlite", read_only=True)
    rows = spool.rows("run", 0, 10**6)
    spool.close()
    assert [row["train/step"] for _, row in rows if "train/step" in row] == list(range(1, num_steps + 1))


@pytest.mark.parametrize("what", ["all", "the journal", "the lock"])
def test_removed_state_directory(place: Place, what: str) -> None:
    """What is removed under a live sidecar is made anew, filled from the trainer's ring, and its own alone again."""
    trainer = place.trainer()
    sidecar = place.sidecar()
    wait_for(lambda: sidecar.status()["records"]["received"] > 50, "records")
    files = {"the journal": place.state_dir / "journal.sqlite", "the lock": place.state_dir / "sidecar.lock"}
    if what == "all":
        shutil.rmtree(place.state_dir)
    else:
        files[what].unlink()
    wait_for(lambda: not is_on_disk(sidecar), "the loss to be noticed")
    assert_goes_on(sidecar)
    wait_for(lambda: is_on_disk(sidecar), "the return to the disk", 30)
    wait_for(lambda: sidecar.status()["records"]["received"] > 500, "the records from before")
    second = place.command("run", "--state-dir", str(place.state_dir), "--listen", "127.0.0.1:0")
    _, num_records = trainer.stop()
    wait_for(lambda: not sidecar.status()["trainers"], "the end of the trainer")
    counts = sidecar.status()["records"]
    sidecar.terminate()

    assert (second.returncode, f"in use by a sidecar with pid {sidecar.process.pid}" in second.stderr) == (1, True)
    assert (counts["received"], counts["lost"]) == (num_records, 0)
    assert_journal_equals(place.state_dir / "journal.sqlite", place.audit("run"))
