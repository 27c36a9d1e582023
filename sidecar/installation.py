"""STATE_DIR/metrics.toml and the one before it: replaced as a whole, kept, put back.

Every file is written beside its place, synced and renamed, so a power cut or a kill leaves the old one or the new one.
The one before is written first: whatever comes in between, what was live is still there.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sidecar.live_definitions import OWN_NAME
from sidecar.whole_file import replace_whole

PREVIOUS_NAME = "metrics.previous.toml"
LOCK_NAME = "apply.lock"
_DRAFT_PREFIX = ".apply."


class InstallationError(ValueError):
    """Files that cannot be replaced; the message is meant for the user."""


class Installation:
    """The definitions of a state directory, held by one `apply` at a time (`hold`)."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self.file = state_dir / OWN_NAME
        self.previous = state_dir / PREVIOUS_NAME
        self._before: tuple[bytes | None, bytes | None] = (None, None)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep others from replacing the files at the same time; raises InstallationError."""
        try:
            self._state_dir.mkdir(mode=0o750, parents=True, exist_ok=True)
            fd = os.open(self._state_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InstallationError(
                f"{self._state_dir}: {error.strerror}; run it as the directory's owner, or give another --state-dir"
            ) from error
        try:
            _lock(fd, self._state_dir)
            for draft in self._state_dir.glob(f"{_DRAFT_PREFIX}*"):  # of one that was killed
                with contextlib.suppress(OSError):
                    draft.unlink()
            yield
        finally:
            os.close(fd)

    def replace(self, content: bytes, live: bytes) -> None:
        """Put a file in place, and keep the one before: what is `live`, where that is not the file that was there.

        Raises:
            InstallationError: nothing was replaced.
        """
        self._before = (_content(self.file), _content(self.previous))
        is_there_already = self._before[0] == content
        before = live if self._before[0] is None or is_there_already else self._before[0]
        try:
            if before != content:
                _write(self.previous, before)
            if not is_there_already:
                _write(self.file, content)
        except OSError as error:
            raise InstallationError(f"{self.file}: {error.strerror}; nothing was replaced") from error

    def put_back(self) -> None:
        """Undo the last `replace`; raises InstallationError."""
        try:
            for path, content in zip((self.file, self.previous), self._before, strict=True):
                if content is None:
                    path.unlink(missing_ok=True)
                elif content != _content(path):
                    _write(path, content)
        except OSError as error:
            raise InstallationError(f"{self.file}: {error.strerror}; the file before is {self.previous}") from error


def _lock(fd: int, state_dir: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InstallationError(f"another apply is at work in {state_dir}; wait for it") from error


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InstallationError(f"{path}: {error.strerror}; make it readable or move it away") from error


def _write(path: Path, content: bytes) -> None:
    """Replace a file as a whole, for the same owner as its directory."""

    def own(fd: int) -> None:
        if os.geteuid() == 0:  # root applies, the sidecar has to read it
            owner = path.parent.stat()
            os.fchown(fd, owner.st_uid, owner.st_gid)

    replace_whole(path, content, _DRAFT_PREFIX, own)
