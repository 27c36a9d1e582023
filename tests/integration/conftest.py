"""Where integration tests happen: a place of their own, and a W&B server for those that upload."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_wandb import FakeWandb
from sidecar_process import Place


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """An empty place; what was started there is killed in the end."""
    place = Place(tmp_path)
    yield place
    place.close()


@pytest.fixture
def server() -> Iterator[FakeWandb]:
    """A W&B server of our own."""
    server = FakeWandb().start()
    yield server
    server.close()


@pytest.fixture
def uploading(place: Place, server: FakeWandb) -> None:
    """Let the processes of the place use the server."""
    place.environ |= server.environment
