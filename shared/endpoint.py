"""Where a trainer's socket lies, and who may own it.

A second `bind` on an ipc path silently steals it from the first, and a path is never unlinked when its owner dies.
So a trainer takes an advisory lock beside the path first, then probes the socket for a live owner that does not lock
(an older version, another program), and only then binds. The lock dies with the process; the files may stay.
"""

import fcntl
import os
import re
import socket
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq

SYSTEM_RUNTIME_DIR = Path("/run/dflash")
MAX_PATH_BYTES = 107
"""The kernel's limit for a socket path (sockaddr_un)."""
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class EndpointError(ValueError):
    """An endpoint that cannot be used: busy, too long, or in a directory that is not ours."""


def runtime_dir(environ: Mapping[str, str]) -> Path:
    """Directory of the endpoints: DFLASH_RUNTIME_DIR, /run/dflash if writable, else $XDG_RUNTIME_DIR/dflash."""
    if chosen := environ.get("DFLASH_RUNTIME_DIR"):
        return Path(chosen)
    if SYSTEM_RUNTIME_DIR.is_dir() and os.access(SYSTEM_RUNTIME_DIR, os.W_OK):
        return SYSTEM_RUNTIME_DIR
    if session := environ.get("XDG_RUNTIME_DIR"):
        return Path(session) / "dflash"
    return Path(f"/tmp/dflash-{os.getuid()}")  # noqa: S108 - ensure_runtime_dir refuses it unless we own it


def ensure_runtime_dir(path: Path) -> None:
    """Create the directory (0700) or check that nobody else could have planted it; raises EndpointError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_runtime_dir(path)
    except OSError as error:
        raise EndpointError(f"{path}: {error.strerror}; set DFLASH_RUNTIME_DIR to a writable directory") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise EndpointError(f"{path} is not writable; set DFLASH_RUNTIME_DIR to a writable directory")


def check_runtime_dir(path: Path) -> None:
    """Refuse a directory in which anybody could plant a socket.

    Raises:
        EndpointError: who could, and what to do.
        OSError: there is no such directory.
    """
    info = path.stat()
    if info.st_mode & stat.S_IWOTH:
        raise EndpointError(f"{path} is writable by everybody; chmod o-w it or set DFLASH_RUNTIME_DIR")
    # Where everybody may make a directory (or a link to one), somebody else may have made this one first.
    parent = path.parent.stat()
    if parent.st_mode & stat.S_IWOTH and path.lstat().st_uid not in {os.getuid(), parent.st_uid}:
        raise EndpointError(f"{path} belongs to another user; set DFLASH_RUNTIME_DIR to a directory of your own")


def socket_path(directory: Path, run_id: str, rank: int) -> Path:
    """Path of one trainer's socket; raises EndpointError for names that are no file name or too long."""
    if not _RUN_ID.fullmatch(run_id):
        raise EndpointError(f"run id {run_id!r} must be 1 to 64 letters, digits, '.', '_' or '-'")
    path = directory / f"{run_id}-{rank}.sock"
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise EndpointError(f"{path} is longer than {MAX_PATH_BYTES} bytes; set DFLASH_RUNTIME_DIR to a shorter path")
    return path


def live_owner_pid(path: Path) -> int | None:
    """Process id of whoever listens on the socket, None when nobody does (absent or stale)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a stopped owner's backlog fills up, and a connect would wait for it
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except OSError:
            return 0  # somebody is there but will not talk to us: treat as taken
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid: int = struct.unpack("3i", credentials)[0]
        return pid


def bind_group_writable(socket: "zmq.Socket[bytes]", path: Path) -> None:
    """Bind so that owner and group may connect and nobody else, whatever umask the trainer was started with."""
    previous = os.umask(0o117)
    try:
        socket.bind(f"ipc://{path}")
    finally:
        os.umask(previous)


class EndpointClaim:
    """Exclusive ownership of a socket path for as long as the context lasts.

    Raises:
        EndpointError: another live process owns the path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_path = path.with_suffix(".lock")
        self._lock_fd: int | None = None

    def __enter__(self) -> Self:
        ensure_runtime_dir(self.path.parent)
        try:
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o660)
        except OSError as error:
            raise EndpointError(
                f"{self._lock_path}: {error.strerror}; remove it or give this run another run.id"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise self._busy() from error
        if live_owner_pid(self.path) is not None:
            os.close(fd)
            raise self._busy()
        self._lock_fd = fd
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock_fd is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._lock_fd)
            self._lock_fd = None

    def _busy(self) -> EndpointError:
        owner = live_owner_pid(self.path)
        who = f"process {owner}" if owner else "another process"
        return EndpointError(f"{self.path} is in use by {who}; give this run another run.id or stop the other one")
