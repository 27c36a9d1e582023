"""The uploading child and wandb-core killed again and again under a run whose rows come at a steady pace."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from audit import assert_journal_equals, assert_wandb_equals
from fake_wandb import HISTORY, FakeWandb
from sidecar_process import Place, wait_for

ONLINE = (
    *("--set", "wandb.mode=online", "--set", "wandb.transmit_interval_s=1"),
    *("--set", "wandb.interval_s=1", "--set", "wandb.takeover_s=8"),
)
NUM_KILLS = [5, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
VICTIMS = {"the child": "sidecar.sinks.wandb_child", "wandb-core": "wandb-core"}


pytestmark = pytest.mark.usefixtures("uploading")


def descendant(pid: int, word: str) -> int | None:
    """A process that this one started, directly or not, with a word in its command line."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if word in Path(f"/proc/{pid}/cmdline").read_text():
            return pid
    except OSError:
        return None
    found = (descendant(int(child), word) for child in children)
    return next((each for each in found if each is not None), None)


@pytest.mark.parametrize("num_kills", NUM_KILLS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_killed_again_and_again(place: Place, server: FakeWandb, victim: str, num_kills: int) -> None:
    """At random moments, at starting, attaching, sending or idle: W&B has every step once, and /metrics never waits."""
    run = server.run("run")
    random.seed(num_kills)
    trainer = place.trainer(steps_per_second=30.0)
    sidecar = place.sidecar(*ONLINE)
    states, slowest_scrape_s, kills = set[str](), 0.0, 0
    while kills < num_kills:
        wait_for(lambda: descendant(sidecar.process.pid, VICTIMS[victim]) is not None, f"{victim} to be there")
        end_s = time.monotonic() + random.uniform(0.5, 6.0)
        while time.monotonic() < end_s:
            started_s = time.monotonic()
            sidecar.metrics()
            slowest_scrape_s = max(slowest_scrape_s, time.monotonic() - started_s)
            states.add(sidecar.status()["sinks"]["wandb"]["state"])
            time.sleep(0.05)
        if (pid := descendant(sidecar.process.pid, VICTIMS[victim])) is not None:
            os.kill(pid, signal.SIGKILL)
            kills += 1
        assert run.exit_code is None, "a killed child ended the run"
    arrived_in_storm = len(run.files.get(HISTORY, {}))
    num_steps, _ = trainer.stop()
    wait_for(lambda: run.exit_code is not None, "the run to be closed", timeout_s=90)
    sidecar.terminate()
    print(  # noqa: T201 - the figures of a storm are worth seeing
        f"{victim}: {kills} kills, {arrived_in_storm} rows before the last, {num_steps} steps, "
        f"slowest scrape {slowest_scrape_s:.3f} s, {server.requests.count('UpsertBucket')} attachments, {states}"
    )

    assert_wandb_equals(run, place.audit("run"))
    assert_journal_equals(place.state_dir / "journal.sqlite", place.audit("run"))
    assert run.exit_code == 0
    assert "conflict" not in states
    assert arrived_in_storm > 0
    assert slowest_scrape_s < 5.0  # milliseconds on a machine with nothing else to do
