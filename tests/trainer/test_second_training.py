"""A DFlash 2 drafter trained by its settings alone, up to the reference that loads it."""

import json
from pathlib import Path

import dflash.model
import pytest
import torch

from trainer.app import main
from trainer.export import load_exported

SETTINGS = {
    "target.layer_ids": "[0, 1, 2]", "data.num_held_out": 4, "drafter.block_size": 4, "drafter.num_layers": 1,
    "drafter.conv_kernel_size": 2, "drafter.conv_group_size": 16, "drafter.selector_rank": 8,
    "drafter.selector_top_k": 5, "train.batch_size": 4, "train.num_anchors": 4, "train.learning_rate": 0.003,
    "evaluation.num_prompts": 2, "evaluation.max_new_tokens": 8, "telemetry.enabled": "false",
}  # fmt: skip


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_second_drafter_is_trained_and_exported(small_target: Path, tmp_path: Path, optimizer: str) -> None:
    """Four steps, and two more on resuming, teach the convolutions; the reference finds all tensors and fields."""
    settings = SETTINGS | {"target.path": small_target, "data.path": small_target / "train.jsonl", "train.steps": 6}
    settings["train.optimizer"] = optimizer
    assigned = [f"--set={key}={value}" for key, value in settings.items()]

    assert main(["--out", str(tmp_path / "run"), "--max-steps", "4", *assigned]) == 0
    assert main(["--out", str(tmp_path / "run"), "--resume"]) == 0

    written = json.loads((tmp_path / "run" / "drafter" / "config.json").read_text())
    assert written["architectures"] == ["DFlash2DraftModel"]
    fields = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    assert [written["dflash_config"][name] for name in fields] == [2, 16, 8, 5]
    _, info = dflash.model.DFlash2DraftModel.from_pretrained(tmp_path / "run" / "drafter", output_loading_info=True)
    assert {name: list(keys) for name, keys in info.items() if keys} == {}
    drafter = load_exported(tmp_path / "run" / "drafter")
    assert drafter.candidate_selector is not None
    assert not torch.any(drafter.candidate_selector.successor_codebook)
    moved = {n: t for n, t in drafter.named_parameters() if "conv" in n and "projection" in n}
    assert moved
    assert all(bool(tensor.any()) for tensor in moved.values())
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["steps"] == 6
    assert report["lossless"] is True
