"""The state directory belongs to one sidecar at a time.

Two sidecars on one journal and one W&B run would overwrite each other, so the owner holds an advisory lock for as
long as it lives; the kernel gives it up even after kill -9. The lock file also tells other commands who the owner is
and where it answers.

What is in there (settings, losses, paths, names) is for its owner and his group: new files are made so, and files of an
older version are changed.
"""

import contextlib
import fcntl
import os
import stat
import time
from pathlib import Path

import msgspec

LOCK_NAME = "sidecar.lock"
LOG_NAME = "sidecar.log"
_PRIVATE = ("*.sqlite*", f"{LOG_NAME}*", "wandb")
_LOCK_ATTEMPTS = 5
_LOCK_PAUSE_S = 0.05


class StateDirError(ValueError):
    """A state directory that cannot be used; the message is meant for the user."""


class Owner(msgspec.Struct, frozen=True):
    """The sidecar that holds a state directory. `url` is empty until it answers."""

    pid: int
    url: str = ""


class StateDir:
    """Exclusive hold of a state directory.

    Raises:
        StateDirError: not writable, or another sidecar holds it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._url = ""
        try:
            self._fd = _take(path)
        except OSError as error:
            raise StateDirError(
                f"{path}: {error.strerror}; give a writable directory with --state-dir or DFLASH_STATE_DIR"
            ) from error
        self.announce("")
        _make_private(path)

    @property
    def is_held(self) -> bool:
        """Whether the lock file that is there is the one we hold: somebody may have removed it, or all of it."""
        return is_same_file(self.path / LOCK_NAME, os.fstat(self._fd))

    def take_again(self) -> bool:
        """Make the directory anew if it was removed; False when that is not possible now.

        Raises:
            StateDirError: another sidecar has taken it meanwhile.
        """
        if not self.is_held:
            try:
                again = _take(self.path)
            except OSError:
                return False
            os.close(self._fd)
            self._fd = again
            self.announce(self._url)
        return True

    def announce(self, url: str) -> None:
        """Write who owns the directory and where it answers; on a disk that takes nothing, nobody learns it."""
        self._url = url
        data = msgspec.json.encode(Owner(os.getpid(), url))
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, data, 0)  # first, so that a full disk has room for it where the last owner's was
            os.ftruncate(self._fd, len(data))

    def close(self) -> None:
        """Give the directory up."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
        os.close(self._fd)


def keep_files_private() -> None:
    """Let this process and those it starts make no file that everybody may read, or the group may write."""
    os.umask(os.umask(0o077) | 0o027)


def is_same_file(path: Path, known: os.stat_result) -> bool:
    """Whether a file that was opened is still what its path names; also when nobody can tell."""
    try:
        return os.path.samestat(path.stat(), known)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def owner_of(path: Path) -> Owner | None:
    """The live sidecar that holds a state directory, None when there is none."""
    try:
        fd = os.open(path / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(path)
    finally:
        os.close(fd)
    return None


def _make_private(path: Path) -> None:
    for pattern in _PRIVATE:
        for file in path.glob(pattern):
            mode = stat.S_IMODE(file.stat().st_mode)
            if mode & stat.S_IRWXO:
                with contextlib.suppress(OSError):  # another user's, or on a disk that takes nothing
                    file.chmod(mode & ~stat.S_IRWXO)


def _take(path: Path) -> int:
    """Make the directory and lock it; raises OSError when it cannot be made, StateDirError when another one has it."""
    path.mkdir(mode=0o750, parents=True, exist_ok=True)
    fd = _open_lock(path / LOCK_NAME)
    try:
        _lock(fd)
    except BlockingIOError as error:
        os.close(fd)
        owner = _read(path)
        who = f"a sidecar with pid {owner.pid}" if owner else "another sidecar"
        raise StateDirError(f"{path} is in use by {who}; stop it or give another --state-dir") from error
    return fd


def _open_lock(path: Path) -> int:
    """Open the lock file; where it cannot be written any more, holding it is enough."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        if not path.exists():
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _lock(fd: int) -> None:
    """Take the lock; wait a little, because `owner_of` holds it for a moment and a killed owner may still be dying."""
    for attempt in range(_LOCK_ATTEMPTS):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt == _LOCK_ATTEMPTS - 1:
                raise
            time.sleep(_LOCK_PAUSE_S)
        else:
            return


def _read(path: Path) -> Owner | None:
    try:
        return msgspec.json.decode((path / LOCK_NAME).read_bytes(), type=Owner)
    except (OSError, msgspec.DecodeError):
        return None
