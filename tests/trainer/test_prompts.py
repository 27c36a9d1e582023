"""Built-in prompts and the cache of their answers."""

import json
from pathlib import Path

import pytest
from tiny_targets import tiny_model, tiny_tokenizer

from trainer.prompts import FORMS, SUBJECTS, answered_prompts, built_in_prompts
from trainer.target import Target


@pytest.fixture(name="saved")
def save_target(tmp_path: Path) -> Path:
    """Write a tiny target."""
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


class TestBuiltInPrompts:
    """The list itself."""

    def test_is_fixed_and_free_of_repeats(self) -> None:
        """A shorter list is the beginning of a longer one, and no prompt occurs twice."""
        prompts = built_in_prompts(10_000)

        assert len(set(prompts)) == len(prompts) == len(FORMS) * len(SUBJECTS)
        assert built_in_prompts(7) == prompts[:7]
        assert sum("{" in prompt for prompt in prompts) == 0


class TestAnsweredPrompts:
    """Answers and their cache."""

    def test_answers_once(self, saved: Path, tmp_path: Path) -> None:
        """The answers are made at the first call, with progress, and found at the second."""
        target = Target.load(saved, layer_ids=[0])
        lines: list[str] = []
        paths = [
            answered_prompts(
                target, str(saved), tmp_path / "cache", num_prompts=3, max_new_tokens=4, on_progress=lines.append
            )
            for _ in range(2)
        ]

        assert paths[0] == paths[1]
        assert [json.loads(line)["prompt"] for line in paths[0].read_text().splitlines()] == built_in_prompts(3)
        assert lines == ["the target answers built-in prompts: 3/3"]

    def test_changed_target_or_limits_answer_anew(self, saved: Path, tmp_path: Path) -> None:
        """Other weights in the same place, or other limits, never meet stale answers."""
        made = []
        for seed, max_new_tokens in ((0, 4), (0, 5), (1, 5)):
            if seed:
                tiny_model(num_layers=2).save_pretrained(saved)
            target = Target.load(saved, layer_ids=[0])
            made.append(
                answered_prompts(target, str(saved), tmp_path / "cache", num_prompts=2, max_new_tokens=max_new_tokens)
            )

        assert len(set(made)) == 3

    def test_unusable_cache_is_an_error(self, saved: Path, tmp_path: Path) -> None:
        """A cache directory that cannot be made is one line with the remedy."""
        (tmp_path / "file").touch()

        with pytest.raises(ValueError, match=r"cache .*file/dflash: .*; set XDG_CACHE_HOME"):
            answered_prompts(
                Target.load(saved, layer_ids=[0]),
                str(saved),
                tmp_path / "file" / "dflash",
                num_prompts=1,
                max_new_tokens=4,
            )
