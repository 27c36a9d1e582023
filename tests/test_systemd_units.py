"""The shipped units, as systemd itself judges them."""

import shutil
import subprocess
from pathlib import Path

import pytest

SHIPPED = Path(__file__).parent.parent / "systemd"
UNIT = "dflash-sidecar.service"
UNITS = (UNIT, "dflash-trainer@.service", "dflash-trainer.slice")
pytestmark = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root directory with the units and the programs they name."""
    for program in ("opt/dflash/venv/bin/dflash-sidecar", "opt/dflash/trainer/bin/dflash-train", "bin/sh"):
        path = tmp_path / program
        path.parent.mkdir(parents=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    units = tmp_path / "etc/systemd/system"
    units.mkdir(parents=True)
    for name in UNITS:
        shutil.copy(SHIPPED / name, units)
    # verify wants to see what the units are ordered against.
    for name in ("sysinit.target", "basic.target", "shutdown.target", "network.target", "multi-user.target"):
        (units / name).write_text("[Unit]\nDescription=x\n")
    return tmp_path


def analyze(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run systemd-analyze."""
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False)


def verify(root: Path, unit: str) -> "subprocess.CompletedProcess[str]":
    """What systemd finds in a unit, an instance of it if it is a template."""
    return analyze("verify", "--man=no", f"--root={root}", unit.replace("@.", "@run."))


@pytest.mark.parametrize("unit", UNITS)
def test_unit_is_accepted_without_a_word(root: Path, unit: str) -> None:
    """`systemd-analyze verify` finds nothing; it ends in 0 for unknown keys too, so its words count."""
    done = verify(root, unit)

    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


@pytest.mark.parametrize(
    ("unit", "key"),
    [(UNIT, "WatchdogSec"), ("dflash-trainer@.service", "Slice"), ("dflash-trainer.slice", "CPUAccounting")],
)
def test_verify_would_have_found_a_mistake(root: Path, unit: str, key: str) -> None:
    """A mistyped key in the same place is reported, so silence means something."""
    path = root / "etc/systemd/system" / unit
    path.write_text(path.read_text().replace(f"{key}=", f"{key}x="))

    assert f"{key}x" in verify(root, unit).stderr


def test_exposure_is_low(root: Path) -> None:
    """The sandbox scores at most 2.0 of 10."""
    done = analyze("security", "--offline=yes", f"--root={root}", "--threshold=20", UNIT)

    assert done.returncode == 0, done.stdout[-2000:]
