"""The CUDA allocator is told to grow its segments, in time and unless the user has told it something else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STOP_AT_TORCH = """
import os, sys

class StopAtTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print({k: v for k, v in os.environ.items() if k.endswith("ALLOC_CONF")})
            raise SystemExit(7)

sys.meta_path.insert(0, StopAtTorch())
from trainer.app import main
main(["--out", sys.argv[1]])
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32"},
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32"},
        ),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, {"PYTORCH_CUDA_ALLOC_CONF": ""}),
    ],
)
def test_the_setting_is_there_when_torch_is_loaded(
    given: dict[str, str], expected: dict[str, str], tmp_path: Path
) -> None:
    """A real command, stopped at its first import of torch, has the user's setting or else ours in its environment."""
    environ = {key: value for key, value in os.environ.items() if not key.endswith("ALLOC_CONF")} | given
    command = [sys.executable, "-c", STOP_AT_TORCH, str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=60)

    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines()[-1] == str(expected)
