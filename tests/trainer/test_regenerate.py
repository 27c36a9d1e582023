"""Answering prompts with the target's own greedy text."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny_targets import CHATML, NO_SYSTEM, random_ids, tiny_model, tiny_tokenizer

from trainer.data import Message, SampleReader
from trainer.regenerate import generate_greedy, read_prompts, regenerate
from trainer.target import Target


@pytest.fixture(name="target")
def make_target() -> Target:
    """Return a tiny target that speaks ChatML."""
    return Target(tiny_model(tied=False), tiny_tokenizer(CHATML), (0,))


def argmax_alone(target: Target, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """Decode one prompt greedily without batch, padding or cache."""
    ids = list(prompt)
    for _ in range(max_new_tokens):
        ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in target.eos_token_ids:
            break
    return ids[len(prompt) :]


def ending_with(target: Target, token: int) -> Target:
    """Return the target with another token that ends its responses."""
    target.model.generation_config.eos_token_id = token
    return target


class TestGenerateGreedy:
    """Batched decoding against the plainest possible decoding."""

    def test_batch_equals_each_prompt_alone(self, target: Target) -> None:
        """Prompts of different lengths, padded into one batch, are continued as each would be alone."""
        prompts = [random_ids(n, seed=n).tolist() for n in (3, 11, 1, 7)]

        expected = [argmax_alone(target, prompt, 12) for prompt in prompts]
        assert len({tuple(answer) for answer in expected}) == 4
        assert generate_greedy(target, prompts, 12) == expected

    def test_stops_at_the_end_of_each_response(self, target: Target) -> None:
        """Each response ends with its own end token while others go on."""
        prompts = [[5, 6, 7], [9, 8]]
        free = [argmax_alone(target, prompt, 12) for prompt in prompts]
        end = next(token for token in free[0][2:] if token not in free[1] and token not in free[0][:2])
        ended = generate_greedy(ending_with(target, end), prompts, 12)

        assert ended == [free[0][: free[0].index(end) + 1], free[1]]

    def test_without_padding_equals_each_prompt_alone(self, target: Target) -> None:
        """Prompts of equal length take the path without a mask and give the same tokens."""
        prompts = [random_ids(6, seed=seed).tolist() for seed in range(3)]

        assert generate_greedy(target, prompts, 8) == [argmax_alone(target, prompt, 8) for prompt in prompts]


class TestRegenerate:
    """From prompts to a file of answers."""

    def test_file_holds_the_targets_answers_and_trains(self, target: Target, tmp_path: Path) -> None:
        """Each line is a prompt and its greedy answer, in order, and the file is read as training data."""
        prompts = [[Message("user", text)] for text in ("why?", "one two", "the cat sat on the mat", "the moon", "ten")]
        progress: list[tuple[int, int]] = []
        report = regenerate(
            target,
            prompts,
            tmp_path / "out.jsonl",
            max_new_tokens=8,
            batch_size=2,
            on_progress=lambda done, total: progress.append((done, total)),
        )
        lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]

        assert (report.num_written, report.skipped) == (5, {})
        assert [line["prompt"] for line in lines] == [messages[0].content for messages in prompts]
        for messages, line in zip(prompts, lines, strict=True):
            text = target.tokenizer.apply_chat_template(
                [{"role": "user", "content": messages[0].content}], tokenize=False, add_generation_prompt=True
            )
            answer = argmax_alone(target, target.tokenizer(text)["input_ids"], 8)
            assert line["response"] == target.tokenizer.decode(answer, skip_special_tokens=True)
        assert progress == [(2, 5), (4, 5), (5, 5)]
        reader = SampleReader(
            target.tokenizer, eos_token_ids=target.eos_token_ids, vocab_size=target.vocab_size, max_length=512
        )
        assert len(reader.read(tmp_path / "out.jsonl").samples) == 5

    def test_cut_answers_are_marked(self, target: Target, tmp_path: Path) -> None:
        """Only an answer that reached its end is complete."""
        question = Message("user", "why?")
        free = argmax_alone(target, ids_of(target, [question]), 12)
        cut_off = next(i for i in range(2, 12) if free[i] not in free[:i])
        ending_with(target, free[cut_off])
        for limit in (cut_off, cut_off + 1):
            regenerate(target, [[question]], tmp_path / f"{limit}.jsonl", max_new_tokens=limit, batch_size=1)

        assert json.loads((tmp_path / f"{cut_off}.jsonl").read_text())["complete"] is False
        assert "complete" not in json.loads((tmp_path / f"{cut_off + 1}.jsonl").read_text())

    def test_every_turn_is_answered_anew(self, target: Target, tmp_path: Path) -> None:
        """Assistant turns are replaced one after the other, each on top of the target's own earlier answers."""
        first, second = Message("user", "why?"), Message("user", "one two")
        free = argmax_alone(target, ids_of(target, [first]), 12)
        ending_with(target, free[3])
        answer = Message("assistant", target.tokenizer.decode(free[: free.index(free[3])], skip_special_tokens=True))
        regenerate(
            target,
            [[first, Message("assistant", "someone else's words"), second]],
            tmp_path / "out.jsonl",
            max_new_tokens=12,
            batch_size=4,
        )
        said = json.loads((tmp_path / "out.jsonl").read_text())["conversations"]
        again = argmax_alone(target, ids_of(target, [first, answer, second]), 12)

        assert [turn["role"] for turn in said] == ["user", "assistant", "user", "assistant"]
        assert said[1]["content"] == answer.content
        assert said[3]["content"] == target.tokenizer.decode(again, skip_special_tokens=True)

    def test_written_and_skipped_add_up(self, tmp_path: Path) -> None:
        """Prompts that are refused, too long or answered with nothing are counted by reason, and the rest written."""
        target = Target(tiny_model(tied=False), tiny_tokenizer(NO_SYSTEM), (0,))
        empty = Message("user", "ten")
        ending_with(target, argmax_alone(target, ids_of(target, [empty]), 1)[0])
        prompts = [
            [Message("system", "the cat"), Message("user", "why?")],
            [Message("user", "why? " * 200)],
            [empty],
            [Message("user", "the moon")],
        ]
        report = regenerate(target, prompts, tmp_path / "out.jsonl", max_new_tokens=6, batch_size=4)

        assert report.skipped == {"refused": 1, "too_long": 1, "empty": 1}
        assert report.num_written == len((tmp_path / "out.jsonl").read_text().splitlines()) == 1

    def test_nothing_half_written(self, target: Target, tmp_path: Path) -> None:
        """A run that is interrupted leaves an existing file alone and no other behind."""

        def interrupt(_done: int, _total: int) -> None:
            raise KeyboardInterrupt

        out_path = tmp_path / "out.jsonl"
        out_path.write_text("before\n")
        with pytest.raises(KeyboardInterrupt):
            regenerate(
                target,
                [[Message("user", "why?")]] * 3,
                out_path,
                max_new_tokens=4,
                batch_size=1,
                on_progress=interrupt,
            )

        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out.jsonl", "before\n")]

    def test_unwritable_place_is_an_error(self, target: Target, tmp_path: Path) -> None:
        """A file in a directory that does not exist is refused in one line."""
        with pytest.raises(ValueError, match=r"absent/out\.jsonl: No such file or directory; choose a writable file"):
            regenerate(
                target, [[Message("user", "why?")]], tmp_path / "absent" / "out.jsonl", max_new_tokens=4, batch_size=1
            )


class TestReadPrompts:
    """Files of prompts."""

    def test_text_and_jsonl(self, tmp_path: Path) -> None:
        """A text file has one prompt a line; a JSONL file has prompts or conversations; blank lines do not count."""
        (tmp_path / "a.txt").write_text("why?\n\n  the moon \n")
        (tmp_path / "b.jsonl").write_text(
            '{"prompt": "why?", "response": "ignored"}\n{"conversations": [{"role": "user", "content": "ten"}]}\n'
        )

        assert read_prompts(tmp_path / "a.txt") == [[Message("user", "why?")], [Message("user", "the moon")]]
        assert read_prompts(tmp_path / "b.jsonl") == [[Message("user", "why?")], [Message("user", "ten")]]

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("broken", "malformed"),
            ('{"text": "why?"}', "missing required field `conversations`"),
            ('{"conversations": [{"role": "assistant", "content": "ten"}]}', "no user turn to answer"),
        ],
    )
    def test_malformed_line_is_named(self, tmp_path: Path, line: str, reason: str) -> None:
        """A malformed line is an error that names file, line, reason and remedy."""
        (tmp_path / "b.jsonl").write_text(f'{{"prompt": "why?"}}\n{line}\n')

        with pytest.raises(ValueError, match=rf"b\.jsonl:2: .*{reason}.*; each line must be \{{"):
            read_prompts(tmp_path / "b.jsonl")

    def test_empty_file_is_an_error(self, tmp_path: Path) -> None:
        """A file without a prompt is refused."""
        (tmp_path / "a.txt").write_text("\n")

        with pytest.raises(ValueError, match=r"a\.txt: the file is empty"):
            read_prompts(tmp_path / "a.txt")


def ids_of(target: Target, messages: Sequence[Message]) -> list[int]:
    """Render a question with the target's template."""
    turns = [{"role": message.role, "content": message.content} for message in messages]
    text = target.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return list(target.tokenizer(text, add_special_tokens=False)["input_ids"])
