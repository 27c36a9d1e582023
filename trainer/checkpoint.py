"""Checkpoints of a drafter in training: complete or not there at all.

A checkpoint is a directory `checkpoints/step-00000400` with the fp32 weights under their published names
(`drafter.safetensors`), the geometry (`drafter_config.json`), the optimizer's moments (`optimizer.pt`) and the position
in schedule and data (`state.json`). It is written beside its final name, flushed, and renamed; only then does the
text file `latest` point to it. A run that is killed while saving resumes from the one before.
"""

import os
import shutil
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.cursor import Cursor
from trainer.drafter_config import DrafterConfig

WEIGHTS_FILE = "drafter.safetensors"
GEOMETRY_FILE = "drafter_config.json"
OPTIMIZER_FILE = "optimizer.pt"
STATE_FILE = "state.json"


class TrainState(msgspec.Struct, frozen=True, kw_only=True):
    """Where training stands, besides the tensors."""

    step: int = 0
    cursor: Cursor = Cursor()


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a resumed run continues from."""

    weights: dict[str, Tensor]
    geometry: DrafterConfig
    optimizer: dict[str, object]
    state: TrainState


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        run_dir: directory of the run.
        keep: how many of the newest to keep.
    """

    def __init__(self, run_dir: Path, keep: int = 2) -> None:
        self.run_dir = run_dir
        self._root = run_dir / "checkpoints"
        self._keep = keep

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint and point `latest` to it; raises OSError and then leaves the previous one in charge."""
        final = self._root / f"step-{checkpoint.state.step:08d}"
        partial = self._root / f".{final.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(checkpoint.weights, partial / WEIGHTS_FILE)
        torch.save(checkpoint.optimizer, partial / OPTIMIZER_FILE)
        (partial / GEOMETRY_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(checkpoint.geometry)))
        (partial / STATE_FILE).write_bytes(msgspec.json.encode(checkpoint.state))
        for path in partial.iterdir():
            _flush(path)
        _flush(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        write_atomically(self._root / "latest", final.name.encode())
        self._forget_old(final)
        return final

    def load_latest(self) -> Checkpoint:
        """Read the newest checkpoint; raises ValueError when there is none or it is damaged."""
        pointer = self._root / "latest"
        try:
            path = self._root / pointer.read_text().strip()
            return Checkpoint(
                weights=load_file(path / WEIGHTS_FILE),
                geometry=msgspec.json.decode((path / GEOMETRY_FILE).read_bytes(), type=DrafterConfig),
                # Onto the host: a run may be resumed where its GPU does not exist, and the optimizer moves it anyway.
                optimizer=torch.load(path / OPTIMIZER_FILE, weights_only=True, map_location="cpu"),
                state=msgspec.json.decode((path / STATE_FILE).read_bytes(), type=TrainState),
            )
        except FileNotFoundError as error:
            raise ValueError(
                f"{error.filename}: no checkpoint to resume from; start a new run without --resume"
            ) from error
        except (msgspec.MsgspecError, SafetensorError, RuntimeError, OSError, EOFError) as error:
            raise ValueError(f"{pointer}: the checkpoint is damaged ({error}); point it to an older one") from error

    def _forget_old(self, newest: Path) -> None:
        complete = sorted(self._root.glob("step-*"))
        for path in complete[: -self._keep]:
            if path != newest:
                shutil.rmtree(path)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file so that a reader, or a crash, sees the old content or the new, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    _flush(partial)
    partial.replace(path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
