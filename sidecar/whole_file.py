"""Replaces files as a whole: a reader, a kill or a power cut finds the old content or the new one, never a part."""

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def replace_whole(path: Path, content: bytes, prefix: str, own: Callable[[int], None]) -> None:
    """Write beside a file, sync, and rename over it. Raises OSError, and nothing was replaced then.

    Args:
        path: in a directory that exists.
        content: all of it.
        prefix: begins the name of the draft, which a kill would leave behind.
        own: gives the open draft the owner or the mode of the file; at first it is its writer's alone.
    """
    fd, draft = tempfile.mkstemp(prefix=prefix, dir=path.parent)
    try:
        with open(fd, "wb") as stream:  # noqa: PTH123 - a descriptor
            stream.write(content)
            stream.flush()
            own(fd)
            os.fsync(fd)
        Path(draft).replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            Path(draft).unlink()
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
