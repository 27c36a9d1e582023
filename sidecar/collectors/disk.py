"""Reads the file systems that hold the state directory and each trainer's checkpoints.

A collector of its own, because a network file system whose server is gone holds a call for minutes.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sidecar.collectors.catalogue import DISK_FAMILIES
from sidecar.collectors.reading import export
from sidecar.samples import ExportedFamily, Labels, Point, with_label
from sidecar.stored import StoredSession

OUT_DIR_KEY = "run.out_dir"
"""Where the hello's configuration says in which directory the run keeps its checkpoints."""
_log = logging.getLogger(__name__)


class DiskCollector:
    """Read the file systems of directories; one that is not there is left out.

    Args:
        state_dir: of the sidecar.
        trainers: every live session of this machine.
    """

    name = "disk"

    def __init__(self, state_dir: Path, trainers: Callable[[], Sequence[StoredSession]]) -> None:
        self._state_dir = state_dir
        self._trainers = trainers
        self._unreadable: set[Path] = set()

    def collect(self) -> tuple[ExportedFamily, ...]:
        """Read everything now."""
        values = [*self._disk("state", (), self._state_dir)]
        for session in self._trainers():
            out_dir = session.hello.config.get(OUT_DIR_KEY)
            if isinstance(out_dir, str) and out_dir.startswith("/") and "\0" not in out_dir:
                values += self._disk("checkpoints", session.labels, Path(out_dir))
        return export(DISK_FAMILIES, values)

    def _disk(self, name: str, labels: Labels, directory: Path) -> Iterator[Point]:
        try:
            info = os.statvfs(directory)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            if directory not in self._unreadable:
                self._unreadable.add(directory)
                _log.warning("%s: %s; its disk is not watched", directory, error.strerror)
            return
        if directory in self._unreadable:
            self._unreadable.remove(directory)
            _log.info("%s: its disk is watched now", directory)
        own = with_label(labels, "directory", name)
        yield "dflash_host_disk_total_bytes", own, float(info.f_blocks * info.f_frsize)
        yield "dflash_host_disk_free_bytes", own, float(info.f_bavail * info.f_frsize)
