"""The embedded target, made much smaller by the same code."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from trainer.data import SampleReader
from trainer.embedded_target import (
    EmbeddedRecipe,
    EmbeddedTarget,
    default_cache_dir,
    embedded_target,
    split_topics,
)
from trainer.regenerate import generate_greedy
from trainer.target import Target

SMALL = EmbeddedRecipe(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    head_dim=16,
    max_positions=128,
    num_steps=12,
    batch_size=4,
    window=48,
    num_samples=12,
    num_evaluation_prompts=5,
    prompt_tokens=16,
    response_tokens=8,
    generation_batch_size=8,
)


@pytest.fixture(name="built", scope="module")
def build_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[EmbeddedTarget, list[str]]:
    """Build the small target once; return it and the lines it reported."""
    lines: list[str] = []
    return embedded_target(tmp_path_factory.mktemp("cache"), SMALL, lines.append), lines


class TestBuild:
    """What a build leaves behind."""

    def test_loads_like_any_directory(self, built: tuple[EmbeddedTarget, list[str]]) -> None:
        """The directory is an ordinary target with an end token and a mask token of its own."""
        target = Target.load(built[0].directory, layer_ids=[0])

        assert (target.num_layers, target.hidden_size, target.vocab_size) == (2, 32, 300)
        assert target.eos_token_ids == {target.tokenizer.eos_token_id}
        assert target.resolve_mask_token_id() == target.tokenizer.mask_token_id
        assert target.resolve_mask_token_id() not in target.eos_token_ids
        assert target.head_weight is target.embedding_weight

    def test_tokenizer_and_template_keep_text(self, built: tuple[EmbeddedTarget, list[str]]) -> None:
        """Any text survives encoding and decoding, and the chat template joins turns as they are."""
        tokenizer = Target.load(built[0].directory, layer_ids=[0]).tokenizer
        text = "def f(\u00e9):\n    return '\U0001f319'\n"
        turns = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": " c"}]

        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        assert tokenizer.apply_chat_template(turns, tokenize=False) == "a b c"

    def test_training_helped(self, built: tuple[EmbeddedTarget, list[str]]) -> None:
        """Even a dozen steps leave the model far better than chance on topics that it has not seen."""
        target = Target.load(built[0].directory, layer_ids=[0])
        ids = torch.tensor([target.tokenizer(split_topics(SMALL.held_out_stride)[1][0])["input_ids"][:100]])
        loss = target.model(ids, labels=ids).loss

        assert loss.item() < 0.9 * torch.log(torch.tensor(300.0)).item()

    def test_samples_are_the_models_own_greedy_text(self, built: tuple[EmbeddedTarget, list[str]]) -> None:
        """Each training sample is a piece of the text and what the saved model itself would add to it."""
        target = Target.load(built[0].directory, layer_ids=[0])
        records = [json.loads(line) for line in built[0].data_path.read_text().splitlines()]

        assert [record["prompt_length"] for record in records] == [16] * 12
        for record in records[:3]:
            answer = generate_greedy(target, [record["input_ids"][:16]], 8)[0]
            assert record["input_ids"][16:] == answer

    def test_evaluation_prompts_come_from_held_out_topics(self, built: tuple[EmbeddedTarget, list[str]]) -> None:
        """Evaluation prompts are pieces of held-out topics and of no other."""
        target = Target.load(built[0].directory, layer_ids=[0])
        train_texts, held_out_texts = split_topics(SMALL.held_out_stride)
        samples = SampleReader(
            target.tokenizer, eos_token_ids=target.eos_token_ids, vocab_size=target.vocab_size, max_length=64
        ).read(built[0].evaluation_path)
        held_out_ids = [target.tokenizer(text)["input_ids"] for text in held_out_texts]

        assert len(samples.samples) == 5
        assert not set(train_texts) & set(held_out_texts)
        for sample in samples.samples:
            prompt = sample.prompt_ids
            assert len(prompt) == 16
            assert any(prompt == ids[i : i + 16] for ids in held_out_ids for i in range(len(ids)))

    def test_reports_progress(self, built: tuple[EmbeddedTarget, list[str]]) -> None:
        """The user sees training and generation go forward, to their ends."""
        lines = built[1]

        assert lines[0].startswith("embedded target: step 1/12 loss ")
        assert any(line.startswith("embedded target: step 12/12 loss ") for line in lines)
        assert lines[-1] == "embedded target: evaluation.jsonl 5/5 answers"


class TestCache:
    """When a build happens, and what can go wrong."""

    def test_second_run_builds_nothing(self, built: tuple[EmbeddedTarget, list[str]]) -> None:
        """The same recipe is found at once; nothing is reported because nothing is done."""
        lines: list[str] = []
        again = embedded_target(built[0].directory.parent, SMALL, lines.append)

        assert (again, lines) == (built[0], [])

    def test_other_recipe_is_another_directory(self, built: tuple[EmbeddedTarget, list[str]]) -> None:
        """A changed setting gives a new target beside the old one, never the stale one."""
        recipe = dataclasses.replace(SMALL, seed=1, num_steps=1, num_samples=1, num_evaluation_prompts=1)
        other = embedded_target(built[0].directory.parent, recipe)

        assert other.directory != built[0].directory
        assert built[0].directory.is_dir()

    def test_same_recipe_gives_the_same_files(self, built: tuple[EmbeddedTarget, list[str]], tmp_path: Path) -> None:
        """Building twice gives the same weights and the same data, whatever the global random state."""
        torch.manual_seed(123)
        again = embedded_target(tmp_path, SMALL)

        assert again.directory.name == built[0].directory.name
        for name in ("model.safetensors", "train.jsonl", "evaluation.jsonl"):
            assert (again.directory / name).read_bytes() == (built[0].directory / name).read_bytes()

    def test_interrupted_build_leaves_nothing(self, tmp_path: Path) -> None:
        """A build that is interrupted leaves neither a target nor pieces of one."""

        def interrupt(_line: str) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            embedded_target(tmp_path, SMALL, interrupt)

        assert list(tmp_path.iterdir()) == []

    def test_unusable_cache_is_an_error(self, tmp_path: Path) -> None:
        """A cache directory that cannot be made is one line with the remedy."""
        (tmp_path / "file").touch()

        with pytest.raises(ValueError, match=r"cache .*file/dflash: .*; set XDG_CACHE_HOME to a writable directory"):
            embedded_target(tmp_path / "file" / "dflash", SMALL)

    def test_default_cache_dir(self) -> None:
        """The cache lies where XDG says, else under the home directory; an empty variable counts as unset."""
        assert default_cache_dir({"XDG_CACHE_HOME": "/var/cache/me"}) == Path("/var/cache/me/dflash")
        assert default_cache_dir({"XDG_CACHE_HOME": ""}) == Path.home() / ".cache" / "dflash"
