"""The evaluation's own choices: threads, prompts, how tokens are drawn, where the report goes."""

import json
import time
from pathlib import Path

import pytest
import torch

from trainer.app import main as train
from trainer.evaluate import main, quickest_threads


@pytest.mark.parametrize("quickest", [1, 2, 3])
def test_the_quickest_number_of_threads_is_used_and_then_put_back(quickest: int) -> None:
    """Work that is quick with so many threads only is done with so many; afterwards all is as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    tried = []

    def work() -> None:
        tried.append(torch.get_num_threads())
        time.sleep(0 if torch.get_num_threads() == quickest else 0.03)

    try:
        with quickest_threads(work):
            assert torch.get_num_threads() == quickest
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert sorted(set(tried)) == [1, 2, 3]


@pytest.fixture(scope="module")
def run_dir(small_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    settings = {
        "target.path": small_target, "target.layer_ids": "[0, 1, 2]", "data.path": small_target / "train.jsonl",
        "data.num_held_out": 4, "drafter.num_layers": 1, "drafter.block_size": 4, "train.batch_size": 4,
        "train.num_anchors": 4, "train.steps": 2, "evaluation.num_prompts": 0, "evaluation.max_new_tokens": 8,
        "telemetry.enabled": "false",
    }  # fmt: skip
    out_dir = tmp_path_factory.mktemp("evaluated") / "run"
    assert train(["--out", str(out_dir), *(f"--set={key}={value}" for key, value in settings.items())]) == 0
    return out_dir


def test_a_file_of_prompts_and_a_report_file(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All prompts of the file are decoded, and the file of the report says what the terminal says."""
    capsys.readouterr()  # what training said
    (tmp_path / "prompts.txt").write_text("why is the sky blue?\nhello\nsay it again\n")
    arguments = [str(run_dir), "--prompts", str(tmp_path / "prompts.txt"), "--json", str(tmp_path / "report.json")]

    assert main(arguments) == 0

    report = json.loads((tmp_path / "report.json").read_text())
    assert report == json.loads(capsys.readouterr().out)
    assert report["num_prompts"] == 3
    assert report["lossless"] is True
    assert report["temperature"] == 0


def test_drawn_tokens(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Above temperature 0 a seed repeats what is drawn, and from one token only there is nothing to draw."""

    def measured(*options: str) -> dict[str, object]:
        capsys.readouterr()
        assert main([str(run_dir), "--set=evaluation.num_prompts=4", *options]) == 0
        report: dict[str, object] = json.loads(capsys.readouterr().out)
        return report

    drawn, again, greedy = measured("--temperature=1"), measured("--temperature=1"), measured()
    single = measured("--temperature=1", "--top-k=1")

    assert drawn["lossless"] is None
    assert drawn["temperature"] == 1
    assert drawn["histogram"] == again["histogram"]
    assert single["accept_length"] == greedy["accept_length"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature=-1"], "temperature -1.0: must be 0"),
        (["--top-p=0"], "top_p 0.0: must be above 0"),
        (["--prompts=nowhere.txt"], "prompts nowhere.txt"),
        (["--json=/nowhere/report.json", "--set=evaluation.num_prompts=1"], "--json /nowhere/report.json"),
    ],
)
def test_mistakes(run_dir: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each ends in one line that names the option, and exit status 2."""
    with pytest.raises(SystemExit, match="2"):
        main([str(run_dir), *options])

    assert message in capsys.readouterr().err
