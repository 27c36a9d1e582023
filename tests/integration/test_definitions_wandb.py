"""What definitions send to W&B as they come and go, with the real SDK against a local server."""

from collections.abc import ItemsView

import pytest
from fake_wandb import FakeWandb, Run
from sidecar_process import Place, wait_for

ONLINE = ("--set", "wandb.mode=online", "--set", "wandb.transmit_interval_s=1", "--set", "wandb.interval_s=0.5")


pytestmark = pytest.mark.usefixtures("uploading")


def definition(name: str, at: str, key: str) -> str:
    """One metric that goes to W&B."""
    expr = "dflash_step * 0 + 5"
    return (
        f'[[metric]]\nname = "dflash_{name}"\nhelp = "X."\ntype = "gauge"\n'
        f'expr = "{expr}"\nat = "{at}"\nwandb = "{key}"\n'
    )


def apply(place: Place, text: str) -> None:
    """Make a text live."""
    file = place.state_dir.parent / "mine.toml"
    file.write_text(text)
    done = place.command("apply", str(file), "--state-dir", str(place.state_dir))
    assert done.returncode == 0, done


def test_a_removed_definition_stops_its_key_and_leaves_its_history(place: Place, server: FakeWandb) -> None:
    """Keys begin with the apply that adds them and end with the one that removes them; a restart defines all of them.

    At each start of the uploading child every key that the run ever had is defined again, old and new ones.
    """
    run = server.run("run")

    def num_rows(key: str) -> int:
        return sum(key in row for row in run.history)

    trainer = place.trainer(steps_per_second=20.0)
    sidecar = place.sidecar(*ONLINE)
    apply(place, definition("old_tick", "tick", "custom/old_tick") + definition("old_step", "step", "custom/old_step"))
    wait_for(lambda: num_rows("custom/old_tick") > 2 and num_rows("custom/old_step") > 10, "rows of the first set")
    apply(place, definition("new_tick", "tick", "custom/new_tick") + definition("new_step", "step", "custom/new_step"))
    wait_for(lambda: num_rows("custom/new_tick") > 2 and num_rows("custom/new_step") > 10, "rows of the second set")
    before = [dict(row) for row in run.history]
    sidecar.kill()
    sidecar = place.sidecar(*ONLINE)
    wait_for(lambda: len(run.history) > len(before) + 20, "rows after the restart")
    num_steps, _ = trainer.stop()
    wait_for(lambda: run.exit_code is not None, "the run to be closed")
    sidecar.terminate()
    history = run.history

    for at in ("tick", "step"):
        old = [index for index, row in enumerate(history) if f"custom/old_{at}" in row]
        new = [index for index, row in enumerate(history) if f"custom/new_{at}" in row]
        assert old
        assert max(old) < min(new)
        assert {row[f"custom/old_{at}"] for row in history if f"custom/old_{at}" in row} == {5.0}
    assert history[: len(before)] == before
    assert [row["train/step"] for row in history if "train/step" in row] == list(range(1, num_steps + 1))
    assert axes(run) >= {f"custom/{age}_step": "train/step" for age in ("old", "new")}.items()
    assert axes(run) >= {f"custom/{age}_tick": "time/elapsed_s" for age in ("old", "new")}.items()


def axes(run: Run) -> ItemsView[str, str]:
    """The axis that each metric is defined to have, as wandb writes it down: by its place in a list from 1."""
    metrics = run.config["_wandb"]["value"]["m"]
    return {metric["1"]: metrics[metric["5"] - 1]["1"] for metric in metrics if "5" in metric}.items()
