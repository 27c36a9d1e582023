"""A spool that is damaged, lost, from another version: the sidecar goes on, and W&B has every step once."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_wandb import HISTORY, FakeWandb, Run
from sidecar_process import Place, wait_for

ONLINE = (
    *("--set", "wandb.mode=online", "--set", "wandb.transmit_interval_s=1"),
    *("--set", "wandb.interval_s=1", "--set", "wandb.takeover_s=4"),
)


pytestmark = pytest.mark.usefixtures("uploading")


def assert_complete(run: Run, num_steps: int) -> None:
    """Check that every step is there, once and in order, in a dense sequence, and the run closed."""
    assert [row["train/step"] for row in run.history if "train/step" in row] == list(range(1, num_steps + 1))
    assert [row["_step"] for row in run.history] == list(range(len(run.history)))
    assert sequence(run) == sorted(set(sequence(run)))
    assert (run.exit_code, run.conflicts) == (0, [])


def sequence(run: Run) -> list[int]:
    """Numbers of the records that the rows came from."""
    return [int(row["_record"].rpartition(":")[2]) for row in run.history]


def num_rows(run: Run) -> int:
    """Rows on the server."""
    return len(run.files.get(HISTORY, {}))


def damage(spool: Path) -> None:
    """Overwrite pages in the middle of the file, as a failing disk does."""
    with sqlite3.connect(spool) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    size = spool.stat().st_size
    with spool.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (size - 4096))


def remove(spool: Path) -> None:
    """Lose the file."""
    for path in spool.parent.glob("spool.sqlite*"):
        path.unlink()


@pytest.mark.parametrize(
    ("harm", "interval_s"),
    [
        (damage, "0.3"),
        pytest.param(damage, "1", marks=pytest.mark.slow),
        pytest.param(remove, "1", marks=pytest.mark.slow),
    ],
)
def test_spool_is_made_anew_from_the_journal(
    place: Place, server: FakeWandb, harm: Callable[[Path], None], interval_s: str
) -> None:
    """1. Upload. 2. Kill the sidecar and harm its spool. 3. Start it again, also with other telemetry rows.

    Result: rows that W&B has are recognised, those that it lacks are sent, none twice.
    """
    run = server.run("run")
    trainer = place.trainer(steps_per_second=20.0)
    sidecar = place.sidecar(*ONLINE)
    wait_for(lambda: num_rows(run) > 40, "rows to arrive")
    sidecar.kill()
    harm(place.state_dir / "spool.sqlite")
    sidecar = place.sidecar(*ONLINE, "--set", f"wandb.interval_s={interval_s}")
    num_before = num_rows(run)
    wait_for(lambda: num_rows(run) > num_before + 40, "more rows to arrive")
    num_steps, _ = trainer.stop()
    wait_for(lambda: run.exit_code is not None, "the run to be closed")
    sidecar.terminate()

    assert_complete(run, num_steps)
    assert bool(list(place.state_dir.glob("spool.sqlite.corrupt-*"))) == (harm is damage)


@pytest.mark.slow
def test_spool_is_damaged_while_it_is_used(place: Place, server: FakeWandb) -> None:
    """A spool that turns out to be damaged while running is moved aside at once, without a restart."""
    run = server.run("run")
    trainer = place.trainer(steps_per_second=20.0)
    sidecar = place.sidecar(*ONLINE)
    wait_for(lambda: num_rows(run) > 40, "rows to arrive")
    damage(place.state_dir / "spool.sqlite")
    wait_for(lambda: bool(list(place.state_dir.glob("spool.sqlite.corrupt-*"))), "the damage to be found")
    num_before = num_rows(run)
    wait_for(lambda: num_rows(run) > num_before + 40, "more rows to arrive")
    num_steps, _ = trainer.stop()
    wait_for(lambda: run.exit_code is not None, "the run to be closed")
    _, output = sidecar.terminate()

    assert "Traceback" not in output
    assert_complete(run, num_steps)


def test_damaged_spool_of_a_run_that_is_over(place: Place, server: FakeWandb) -> None:
    """Rows that waited in a damaged spool are made again from the journal, although their trainer is long gone."""
    trainer = place.trainer(steps_per_second=20.0)
    sidecar = place.sidecar()
    wait_for(lambda: sidecar.status()["records"]["received"] > 100, "records")
    num_steps, _ = trainer.stop()
    wait_for(lambda: sidecar.status()["trainers"] == [], "the trainer to leave")
    sidecar.terminate()
    damage(place.state_dir / "spool.sqlite")
    sidecar = place.sidecar(*ONLINE)
    run = server.run("run")
    wait_for(lambda: run.exit_code is not None, "the run to be closed")
    sidecar.terminate()

    assert_complete(run, num_steps)


def test_spool_of_a_newer_version_is_refused(place: Place) -> None:
    """A spool written by a newer sidecar is left alone; one line says what to do."""
    place.state_dir.mkdir()
    with sqlite3.connect(place.state_dir / "spool.sqlite") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = (place.state_dir / "spool.sqlite").read_bytes()
    refused = place.command("run", "--state-dir", str(place.state_dir), "--listen", "127.0.0.1:0")

    assert refused.returncode == 1
    assert "spool.sqlite has version 99, this sidecar knows 2" in refused.stderr
    assert (place.state_dir / "spool.sqlite").read_bytes() == before
