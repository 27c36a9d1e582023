"""Who may read what is in the state directory."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.state_dir import StateDir, keep_files_private


@pytest.fixture
def open_umask() -> Iterator[None]:
    """A umask that closes nothing."""
    previous = os.umask(0)
    yield
    os.umask(previous)


def mode_of(path: Path) -> int:
    """The permission bits of a file."""
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("open_umask")
def test_files_of_an_older_version_are_closed_to_others(tmp_path: Path) -> None:
    """What holds data is made private at the next start; what is the user's own, and the lock, stay as they are."""
    names = ["journal.sqlite", "journal.sqlite-wal", "spool.sqlite", "journal.sqlite.corrupt-1", "sidecar.log"]
    for name in (*names, "metrics.toml"):
        (tmp_path / name).touch(mode=0o644)
    (tmp_path / "wandb").mkdir(mode=0o755)
    StateDir(tmp_path).close()

    assert {mode_of(tmp_path / name) for name in names} == {0o640}
    assert mode_of(tmp_path / "wandb") == 0o750
    assert mode_of(tmp_path / "metrics.toml") == 0o644


@pytest.mark.usefixtures("open_umask")
def test_new_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    """An open umask is tightened; one that is tighter already stays."""
    keep_files_private()
    (tmp_path / "new").touch()
    os.umask(0o077)
    keep_files_private()
    (tmp_path / "newer").touch()

    assert (mode_of(tmp_path / "new"), mode_of(tmp_path / "newer")) == (0o640, 0o600)
