"""The sidecar as a process with the real wandb in its child, against a local stand-in for the server."""

import pytest
from fake_wandb import FakeWandb, Run
from sidecar_process import Place, wait_for

ONLINE = ("--set", "wandb.mode=online", "--set", "wandb.transmit_interval_s=1", "--set", "wandb.interval_s=1")


pytestmark = pytest.mark.usefixtures("uploading")


def assert_complete(run: Run, num_steps: int) -> None:
    """Check that every step is there, once and in order, in a dense sequence, and the run closed."""
    assert [row["train/step"] for row in run.history if "train/step" in row] == list(range(1, num_steps + 1))
    assert [row["_step"] for row in run.history] == list(range(len(run.history)))
    assert (run.exit_code, run.conflicts) == (0, [])


def test_every_step_once_and_in_order_over_kills(place: Place, server: FakeWandb) -> None:
    """With the sidecar killed twice in the middle of uploading, the W&B run ends complete, in order and closed."""
    run = server.run("run")
    trainer = place.trainer(steps_per_second=20.0)
    for num_rows in (20, 80):
        sidecar = place.sidecar(*ONLINE)
        wait_for(lambda n=num_rows: len(run.history) > n, "rows to arrive", 60)
        sidecar.kill()
    sidecar = place.sidecar(*ONLINE)
    num_steps, _ = trainer.stop()
    wait_for(lambda: run.exit_code is not None, "the run to be closed", 60)
    sidecar.terminate()

    assert_complete(run, num_steps)


def test_push_uploads_what_waits(place: Place, server: FakeWandb) -> None:
    """Rows of an offline sidecar are uploaded by `push` afterwards, and the run is closed."""
    trainer = place.trainer(steps_per_second=20.0)
    sidecar = place.sidecar()
    wait_for(lambda: sidecar.status()["records"]["received"] > 50, "records")
    num_steps, _ = trainer.stop()
    wait_for(lambda: sidecar.status()["trainers"] == [], "the trainer to leave")
    sidecar.terminate()

    pushed = place.command("push", "--state-dir", str(place.state_dir))

    assert pushed.returncode == 0, pushed
    assert_complete(server.run("run"), num_steps)


def test_termination_is_quick_while_uploading(place: Place, server: FakeWandb) -> None:
    """SIGTERM ends the sidecar within three seconds also while its child uploads to a server that hangs."""
    place.trainer(steps_per_second=20.0)
    sidecar = place.sidecar(*ONLINE)
    wait_for(lambda: len(server.run("run").history) > 0, "rows to arrive", 60)

    took_s, output = sidecar.terminate()

    assert took_s < 3.0
    assert (sidecar.process.returncode, "Traceback" in output) == (0, False)
