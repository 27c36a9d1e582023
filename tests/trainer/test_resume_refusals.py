"""What a run that has begun may not be continued with."""

import json
import shutil
from pathlib import Path

import pytest

from trainer.app import main

SETTINGS = {
    "target.layer_ids": "[0, 1, 2]", "data.num_held_out": 4, "drafter.num_layers": 1, "drafter.block_size": 4,
    "train.batch_size": 4, "train.num_anchors": 4, "train.steps": 4, "evaluation.num_prompts": 0,
    "telemetry.enabled": "false",
}  # fmt: skip


@pytest.fixture
def target(small_target: Path, tmp_path: Path) -> Path:
    """A target of one's own, to change."""
    return shutil.copytree(small_target, tmp_path / "target")


def begin(target: Path, run: Path) -> None:
    """Train two of four steps."""
    settings = SETTINGS | {"target.path": target, "data.path": target / "train.jsonl"}
    assigned = [f"--set={key}={value}" for key, value in settings.items()]
    assert main(["--out", str(run), "--max-steps", "2", *assigned]) == 0


@pytest.mark.parametrize("changed", ["template", "vocabulary"])
def test_another_tokenizer_is_refused(
    target: Path, tmp_path: Path, changed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With another template or vocabulary in the same directory the run ends in one line; put back, it goes on."""
    begin(target, tmp_path / "run")
    whole = shutil.copytree(target, tmp_path / "whole")
    if changed == "template":
        (target / "chat_template.jinja").write_text("{{ bos_token }}" + (target / "chat_template.jinja").read_text())
    else:
        document = json.loads((target / "tokenizer.json").read_text())
        vocabulary = document["model"]["vocab"]
        first, second = [token for token in vocabulary if token.isalpha()][:2]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
        (target / "tokenizer.json").write_text(json.dumps(document))
    capsys.readouterr()

    assert main(["--out", str(tmp_path / "run"), "--resume"]) == 2
    assert "the target's tokenizer or chat template is not the one the run began with" in capsys.readouterr().err
    shutil.rmtree(target)
    shutil.copytree(whole, target)
    assert main(["--out", str(tmp_path / "run"), "--resume"]) == 0


@pytest.mark.parametrize(
    ("key", "value"), [("drafter.mask_token_id", "5"), ("drafter.block_size", "5"), ("target.layer_ids", "[0, 1]")]
)
def test_another_drafter_is_refused(
    target: Path, tmp_path: Path, key: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mask token, block size and tapped layers stay what they were; the one line names the setting."""
    begin(target, tmp_path / "run")
    capsys.readouterr()

    assert main(["--out", str(tmp_path / "run"), "--resume", f"--set={key}={value}"]) == 2
    error = capsys.readouterr().err
    assert f"{key} cannot change in a run that has begun" in error
    assert error.count("\n") == 1
