"""The shipped units, as systemd itself judges them."""

import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).parent.parent / "systemd" / "dflash-sidecar.service"
pytestmark = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root directory with the unit and the programs it names."""
    for program in ("opt/dflash/venv/bin/dflash-sidecar", "bin/kill"):
        path = tmp_path / program
        path.parent.mkdir(parents=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    units = tmp_path / "etc/systemd/system"
    units.mkdir(parents=True)
    shutil.copy(UNIT, units)
    # verify wants to see what the unit is ordered against.
    for name in ("sysinit.target", "basic.target", "shutdown.target", "network.target", "multi-user.target"):
        (units / name).write_text("[Unit]\nDescription=x\n")
    return tmp_path


def analyze(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run systemd-analyze."""
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False)


def test_unit_is_accepted_without_a_word(root: Path) -> None:
    """`systemd-analyze verify` finds nothing; it ends in 0 for unknown keys too, so its words count."""
    done = analyze("verify", "--man=no", f"--root={root}", UNIT.name)

    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def test_verify_would_have_found_a_mistake(root: Path) -> None:
    """A mistyped key in the same place is reported, so silence means something."""
    unit = root / "etc/systemd/system" / UNIT.name
    unit.write_text(unit.read_text().replace("WatchdogSec", "WatchdogSeconds"))

    assert "WatchdogSeconds" in analyze("verify", "--man=no", f"--root={root}", UNIT.name).stderr


def test_exposure_is_low(root: Path) -> None:
    """The sandbox scores at most 2.0 of 10."""
    done = analyze("security", "--offline=yes", f"--root={root}", "--threshold=20", UNIT.name)

    assert done.returncode == 0, done.stdout[-2000:]
