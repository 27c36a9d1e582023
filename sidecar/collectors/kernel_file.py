"""Reads the short files in which the kernel says how things are: /proc, control groups, pressure."""

import os
from pathlib import Path

MAX_FILE_BYTES = 16_384


def read_kernel_file(path: str | Path) -> bytes:
    """A file at once; `Path` would take three times as long, hundreds of times a second. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, MAX_FILE_BYTES)
    finally:
        os.close(descriptor)
