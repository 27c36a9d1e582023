"""A W&B server for the integration tests that upload."""

from collections.abc import Iterator

import pytest
from fake_wandb import FakeWandb
from sidecar_process import Place


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
