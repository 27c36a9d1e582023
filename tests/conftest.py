"""Fixtures for every test."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sidecar_process import Place

if not Path("/dev/nvidiactl").exists():
    # Kernels are interpreted then, which Triton decides when it is first imported, and torch may do that at any time.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory for sockets, whose paths may be no longer than 107 bytes: pytest's own would leave them no room."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="dflash-") as name:
        yield Path(name)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """An empty place; what was started there is killed in the end."""
    place = Place(tmp_path)
    yield place
    place.close()


@pytest.fixture
def own_runtime_dir(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainers of this test have their sockets to themselves."""
    monkeypatch.setenv("DFLASH_RUNTIME_DIR", str(short_path))


@pytest.fixture(scope="session")
def small_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target made small: a real model directory with data, built in a second."""
    from trainer.embedded_target import EmbeddedRecipe, embedded_target  # noqa: PLC0415 - torch only where needed

    recipe = EmbeddedRecipe(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_layers=4,
        head_dim=16,
        max_positions=128,
        num_steps=12,
        batch_size=4,
        window=48,
        num_samples=64,
        num_evaluation_prompts=4,
        prompt_tokens=12,
        response_tokens=24,
        generation_batch_size=64,
    )
    return embedded_target(tmp_path_factory.mktemp("cache"), recipe).directory
