"""Where tests of what watches a sidecar happen."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sidecar_process import Place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """An empty place; what was started there is killed in the end."""
    place = Place(tmp_path)
    yield place
    place.close()
