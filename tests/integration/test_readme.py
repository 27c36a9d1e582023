"""The README's example is run as it stands: a metric is written, checked, applied and filled in under a living run."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from fake_wandb import FakeWandb
from sidecar_process import ROOT, Place, wait_for
from training_run import RUN_ID, last_step, trainer_arguments

SECTION = "## Add a metric to a run that goes on"


def commands(section: str) -> str:
    """The commands of a section's blocks: lines after a `$`, with the here-documents that follow them."""
    text = (ROOT / "README.md").read_text().split(section)[1].split("\n## ")[0]
    script, until = [], ""
    for line in "\n".join(re.findall(r"```\n(.*?)```", text, re.DOTALL)).splitlines():
        if until:
            script.append(line)
            until = "" if line == until else until
        elif line.startswith("$ "):
            script.append(line[2:])
            if match := re.search(r"<<'(\w+)'", line):
                until = match[1]
    return "\n".join(script)


def test_a_metric_is_added_as_the_readme_says(
    small_target: Path, place: Place, server: FakeWandb, tmp_path: Path
) -> None:
    """Every command succeeds; the training PID is the same before and after; W&B has the metric over the whole past."""
    place.environ |= server.environment
    trainer = place.popen(*trainer_arguments(small_target, tmp_path / "run"))
    sidecar = place.sidecar("--set=wandb.mode=online", "--set=wandb.interval_s=1", "--set=wandb.transmit_interval_s=1")
    wait_for(lambda: any(t["step"] > 100 for t in sidecar.status()["trainers"]), "training", 90)
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (binaries / "dflash-sidecar").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m sidecar "$@"\n')
    (binaries / "dflash-sidecar").chmod(0o755)
    (tmp_path / "sidecar").symlink_to(ROOT / "sidecar")
    environ = place.environ | {
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "DFLASH_STATE_DIR": str(place.state_dir),
    }
    # A `head` that reads to the end: the real one may leave early, and then `status` ends with 141, as it should.
    prelude = 'set -euo pipefail\nhead() { sed -n "1,${1#-}p"; }\n'
    script = prelude + commands(SECTION).replace("localhost:9477", sidecar.url.removeprefix("http://"))
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    trainer.terminate()
    assert trainer.wait(60) == 128 + signal.SIGTERM
    run = server.run(RUN_ID)
    wait_for(lambda: run.exit_code is not None, "W&B to have everything", 90)

    assert re.findall(r"^trainer +pid (\d+),", done.stdout, re.MULTILINE) == [str(trainer.pid)] * 2
    assert re.search(r"^dflash_tokens_per_step \d", done.stdout, re.MULTILINE)
    rows = [row for row in run.history if "custom/tokens_per_step" in row]
    assert [row["_step"] for row in run.history] == list(range(len(run.history)))
    steps = sorted(row["train/step"] for row in rows)
    assert steps == list(range(steps[0], last_step(tmp_path / "run") + 1))
    assert steps[0] <= 100
