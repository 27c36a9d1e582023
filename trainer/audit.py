"""The trainer's own account of what it published, for tests: one line of JSON per record, written before it is sent.

Off unless `telemetry.audit_path` is set, because it writes to a disk on the telemetry thread. A line is written in one
call, so a killed trainer leaves whole lines, and none is missing that a sidecar may have seen.
"""

import os
from pathlib import Path

import msgspec

from shared.wire import Record


class AuditTrail:
    """Append records to a file. One thread only.

    Raises:
        ValueError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ValueError(
                f"telemetry.audit_path={path}: {error.strerror}; leave it empty, it is for tests"
            ) from error

    def write(self, record: Record) -> None:
        """Append one record."""
        os.write(self._fd, msgspec.json.encode(record) + b"\n")
