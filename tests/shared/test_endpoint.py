"""Who may use a trainer's local socket: modes, groups, and directories that somebody else made."""

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.catalogue import TRAINER_FAMILIES
from shared.cells import Cells
from shared.endpoint import EndpointClaim, EndpointError, ensure_runtime_dir, socket_path
from shared.publisher import Identity, Publisher

ROOT = Path(__file__).parent.parent.parent
STRANGER_UID, GROUP_GID, OTHER_GID = 54_321, 54_322, 54_323
BECOME = """
import os, socket, sys
from pathlib import Path
import zmq
from shared.endpoint import EndpointClaim, EndpointError
os.setgroups([]), os.setgid(int(sys.argv[2])), os.setuid(int(sys.argv[3]))
"""
"""Loads everything first: the interpreter's own files may be closed to other users."""
SUBSCRIBE = """
subscriber = zmq.Context().socket(zmq.SUB)
subscriber.setsockopt(zmq.LINGER, 0)
subscriber.subscribe(b"hello")
subscriber.connect("ipc://" + sys.argv[1])
print(subscriber.recv_multipart()[0].decode() if subscriber.poll(1500) else "nothing")
"""
CONNECT = """
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
    print("connected")
except OSError as error:
    print(type(error).__name__)
"""
CLAIM = """
try:
    with EndpointClaim(Path(sys.argv[1])):
        print("claimed")
except EndpointError as error:
    print(error)
"""
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")


@pytest.fixture
def folder(short_path: Path) -> Path:
    """A directory that every user can reach, unlike those of pytest."""
    short_path.chmod(0o755)
    return short_path


@pytest.fixture(params=[0o000, 0o077], ids=["umask 0", "umask 077"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """A umask that is too open, or too tight."""
    previous = os.umask(request.param)
    yield request.param
    os.umask(previous)


def publish(path: Path) -> Publisher:
    """Start publishing on a path."""
    cells = Cells(TRAINER_FAMILIES)
    identity = Identity(run_id="run", session="s1", pid=1, start_time_s=time.time())
    publisher = Publisher(cells=cells, identity=identity, path=path, interval_s=0.05, linger_s=0.0)
    publisher.start()
    return publisher


def run_as(script: str, path: Path, gid: int) -> str:
    """What a script of another user, in one group, prints about a path."""
    command = [sys.executable, "-c", BECOME + script, str(path), str(gid), str(STRANGER_UID)]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout.strip()


def mode_of(path: Path) -> int:
    """The permission bits of a file."""
    return stat.S_IMODE(path.stat().st_mode)


def test_socket_is_for_owner_and_group_whatever_the_umask(folder: Path, umask: int) -> None:
    """The socket has mode 0660 and the umask is as before; a directory that had to be made is the owner's alone."""
    path = socket_path(folder / "run", "run", 0)
    with EndpointClaim(path):
        publisher = publish(path)
        modes = mode_of(path), mode_of(path.parent)
        now = os.umask(umask)
        publisher.close(0)

    assert modes == (0o660, 0o700)
    assert now == umask


@as_root
@pytest.mark.usefixtures("umask")
def test_setgid_directory_gives_its_group_to_the_socket(folder: Path) -> None:
    """In a 2770 directory, as tmpfiles.d makes it, the socket belongs to the directory's group, and that opens it."""
    directory = folder / "run"
    directory.mkdir()
    os.chown(directory, 0, GROUP_GID)
    directory.chmod(0o2770)
    path = socket_path(directory, "run", 0)
    with EndpointClaim(path):
        publisher = publish(path)
        info = path.stat()
        with_group, without = run_as(CONNECT, path, GROUP_GID), run_as(CONNECT, path, OTHER_GID)
        hello, nothing = run_as(SUBSCRIBE, path, GROUP_GID), run_as(SUBSCRIBE, path, OTHER_GID)
        publisher.close(0)

    assert (info.st_gid, stat.S_IMODE(info.st_mode)) == (GROUP_GID, 0o660)
    assert (with_group, without) == ("connected", "PermissionError")
    assert (hello, nothing) == ("hello", "nothing")


@as_root
def test_socket_keeps_out_who_is_not_in_its_group_even_in_an_open_directory(folder: Path) -> None:
    """The socket's own mode is enough: in a directory everybody may enter, only its group may connect."""
    path = socket_path(folder, "run", 0)
    with EndpointClaim(path):
        publisher = publish(path)
        os.chown(path, 0, GROUP_GID)
        with_group, without = run_as(CONNECT, path, GROUP_GID), run_as(CONNECT, path, OTHER_GID)
        publisher.close(0)

    assert (with_group, without) == ("connected", "PermissionError")


def test_directory_that_everybody_may_write_is_refused(folder: Path) -> None:
    """Whoever may make files there could plant a socket; a sticky bit does not help against that."""
    folder.chmod(0o777)
    with pytest.raises(EndpointError, match=r"writable by everybody; chmod o-w it or set DFLASH_RUNTIME_DIR"):
        ensure_runtime_dir(folder)
    folder.chmod(0o1777)
    with pytest.raises(EndpointError, match=r"writable by everybody"):
        ensure_runtime_dir(folder)


@as_root
def test_directory_or_link_that_another_user_made_first_is_refused(folder: Path) -> None:
    """Where everybody may make directories, one of another user is refused, and so is his link to one of ours."""
    folder.chmod(0o1777)
    os.chown(folder, STRANGER_UID + 1, 0)
    theirs, link, ours = folder / "theirs", folder / "link", folder / "ours"
    for path in (theirs, ours):
        path.mkdir(mode=0o700)
    link.symlink_to(ours)
    for path in (theirs, link):
        os.chown(path, STRANGER_UID, STRANGER_UID, follow_symlinks=False)

    ensure_runtime_dir(ours)
    for path in (theirs, link):
        with pytest.raises(EndpointError, match="belongs to another user; set DFLASH_RUNTIME_DIR"):
            ensure_runtime_dir(path)


def test_lock_file_that_is_a_link_is_not_followed(folder: Path) -> None:
    """A planted link at the lock's place is one clear error, and what it points to is not made."""
    path = socket_path(folder, "run", 0)
    path.with_suffix(".lock").symlink_to(folder / "victim")

    with pytest.raises(EndpointError, match=r"run-0\.lock: .*give this run another run\.id"), EndpointClaim(path):
        pass

    assert not (folder / "victim").exists()


@as_root
def test_lock_of_another_user_in_the_group_is_one_clear_error(folder: Path) -> None:
    """A second user of the group who takes the same run id is told so, without a traceback."""
    os.chown(folder, 0, GROUP_GID)
    folder.chmod(0o2770)
    path = socket_path(folder, "run", 0)
    path.with_suffix(".lock").touch(mode=0o640)

    assert run_as(CLAIM, socket_path(folder, "other", 0), GROUP_GID) == "claimed"
    assert "Permission denied; remove it or give this run another run.id" in run_as(CLAIM, path, GROUP_GID)
