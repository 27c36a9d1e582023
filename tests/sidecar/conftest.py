"""Fixtures for the W&B sink: the stand-in server and a spool whose supervisor is ticked."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_wandb import FakeWandb
from wandb_uplink import Uplink, child_basis


@pytest.fixture
def server() -> Iterator[FakeWandb]:
    """A W&B server of our own."""
    server = FakeWandb().start()
    yield server
    server.close()


@pytest.fixture
def uplink(tmp_path: Path, server: FakeWandb) -> Iterator[Uplink]:
    """An empty spool whose supervisor uploads to the server."""
    uplink = Uplink(tmp_path, child_basis(server))
    yield uplink
    uplink.close()
