"""Reading, rendering and truncating training data, for chat templates of several families."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tiny_targets import CHATML, FORGETS_REASONING, HEADERS, NO_SYSTEM, tiny_tokenizer

from trainer.data import ConversationRenderer, Dataset, Message, Sample, SampleReader

EOS = frozenset({0})
ANSWERS = ("the moon", "because of the air.")
TWO_TURNS = [
    Message("user", "why?"),
    Message("assistant", ANSWERS[0]),
    Message("user", "why is the sky blue?"),
    Message("assistant", ANSWERS[1]),
]


def supervised_runs(sample: Sample, template: str) -> list[str]:
    """Decode each run of supervised tokens."""
    runs: list[list[int]] = []
    before = False
    for token, supervised in zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True):
        if supervised and not before:
            runs.append([])
        if supervised:
            runs[-1].append(token)
        before = supervised
    return [tiny_tokenizer(template).decode(run) for run in runs]


def read(tmp_path: Path, lines: Sequence[Mapping[str, object] | str], max_length: int = 512) -> Dataset:
    """Write lines to a file and read them back as a data set."""
    path = tmp_path / "data.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    reader = SampleReader(tiny_tokenizer(), eos_token_ids=EOS, vocab_size=320, max_length=max_length)
    return reader.read(path)


class TestConversationRenderer:
    """Which tokens are supervised."""

    @pytest.mark.parametrize("template", [CHATML, HEADERS, NO_SYSTEM], ids=["chatml", "headers", "no_system"])
    def test_supervises_each_answer_and_its_end(self, template: str) -> None:
        """Every assistant turn is supervised up to and with its end token, and nothing else is."""
        sample = ConversationRenderer(tiny_tokenizer(template), EOS).sample(TWO_TURNS)

        assert supervised_runs(sample, template) == [f"{answer}<|im_end|>" for answer in ANSWERS]

    @pytest.mark.parametrize("template", [CHATML, HEADERS, NO_SYSTEM], ids=["chatml", "headers", "no_system"])
    def test_prompt_of_a_sample_is_what_is_served(self, template: str) -> None:
        """The tokens before the first answer are the rendered prompt, generation prompt included."""
        renderer = ConversationRenderer(tiny_tokenizer(template), EOS)

        assert renderer.sample(TWO_TURNS).prompt_ids == renderer.prompt_ids(TWO_TURNS[:1])

    def test_system_turn_is_not_supervised(self) -> None:
        """A system turn belongs to the prompt."""
        messages = [Message("system", "the cat"), Message("user", "why?"), Message("assistant", "one two")]
        sample = ConversationRenderer(tiny_tokenizer(CHATML), EOS).sample(messages)

        assert supervised_runs(sample, CHATML) == ["one two<|im_end|>"]

    def test_answer_that_occurs_in_the_question_is_not_confused_with_it(self) -> None:
        """Positions decide, not text: an answer that repeats the question is supervised only where it is an answer."""
        messages = [Message("user", "one two"), Message("assistant", "one two")]
        sample = ConversationRenderer(tiny_tokenizer(CHATML), EOS).sample(messages)

        assert supervised_runs(sample, CHATML) == ["one two<|im_end|>"]

    def test_template_that_rewrites_history_still_supervises_the_last_turn(self) -> None:
        """Where earlier turns are rendered differently later on, no token outside an answer gains supervision."""
        messages = [
            Message("user", "why?"),
            Message("assistant", "<think>\nten</think>the moon"),
            Message("user", "why is the sky blue?"),
            Message("assistant", "<think>\nsix</think>the air."),
        ]
        sample = ConversationRenderer(tiny_tokenizer(FORGETS_REASONING), EOS).sample(messages)

        assert supervised_runs(sample, FORGETS_REASONING) == ["six</think>the air.<|im_end|>"]

    def test_end_of_a_cut_answer_is_not_supervised(self) -> None:
        """The end that the template writes after an incomplete last answer is not the target's."""
        renderer = ConversationRenderer(tiny_tokenizer(CHATML), EOS)

        assert supervised_runs(renderer.sample(TWO_TURNS, complete=False), CHATML) == [
            f"{ANSWERS[0]}<|im_end|>",
            ANSWERS[1],
        ]

    def test_text_outside_ascii_is_supervised_whole(self) -> None:
        """A character of several tokens is supervised in all of them."""
        messages = [Message("user", "\u6708\u306f?"), Message("assistant", "\u6708\U0001f319 \u00e9")]
        sample = ConversationRenderer(tiny_tokenizer(CHATML), EOS).sample(messages)

        assert supervised_runs(sample, CHATML) == ["\u6708\U0001f319 \u00e9<|im_end|>"]

    def test_no_chat_template_is_an_error(self) -> None:
        """A target without a chat template cannot render conversations."""
        with pytest.raises(ValueError, match=r"target\.path: the tokenizer has no chat template; put a chat_template"):
            ConversationRenderer(tiny_tokenizer(None), EOS)


class TestSampleReader:
    """From lines to samples."""

    def test_reads_all_three_forms(self, tmp_path: Path) -> None:
        """Conversations and exchanges give the same sample; tokens are taken as they are; blank lines do not count."""
        conversation = {
            "conversations": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "one two"}]
        }
        tokens = {"input_ids": [5, 6, 7, 8], "prompt_length": 2}
        dataset = read(tmp_path, [conversation, "", {"prompt": "why?", "response": "one two"}, tokens])
        first, second, third = dataset.samples

        assert first.input_ids.tolist() == second.input_ids.tolist()
        assert first.loss_mask.tolist() == second.loss_mask.tolist()
        assert third.input_ids.tolist() == [5, 6, 7, 8]
        assert third.loss_mask.tolist() == [False, False, True, True]
        assert dataset.skipped == {}

    def test_truncates_and_counts_what_is_useless(self, tmp_path: Path) -> None:
        """Samples are cut at max_length; those without two supervised tokens in a row, then or before, are counted."""
        lines = [
            {"input_ids": list(range(20)), "prompt_length": 4},
            {"input_ids": list(range(20)), "prompt_length": 7},
            {"input_ids": [1, 2, 3], "prompt_length": 2},
            {"conversations": [{"role": "user", "content": "why?"}]},
        ]
        dataset = read(tmp_path, lines, max_length=8)

        assert [sample.input_ids.tolist() for sample in dataset.samples] == [list(range(8))]
        assert dataset.samples[0].prompt_ids == [0, 1, 2, 3]
        assert dataset.skipped == {"truncated": 1, "unsupervised": 2}

    def test_stops_after_num_samples(self, tmp_path: Path) -> None:
        """Only as many samples as asked for are read, and lines beyond them are not looked at."""
        path = tmp_path / "data.jsonl"
        path.write_text('{"input_ids": [1, 2, 3], "prompt_length": 1}\n' * 3 + "broken\n")
        reader = SampleReader(tiny_tokenizer(None), eos_token_ids=EOS, vocab_size=320, max_length=8)

        assert len(reader.read(path, num_samples=3).samples) == 3

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("{broken", "malformed"),
            ("[1, 2]", "Expected `object`"),
            ('{"text": "why?"}', "missing required field `conversations`"),
            ('{"prompt": "why?"}', "missing required field `response`"),
            ('{"prompt": "why?", "response": 7}', r"Expected `str`, got `int` - at `\$\.response`"),
            (
                '{"conversations": [{"role": "user"}]}',
                r"missing required field `content` - at `\$\.conversations\[0\]`",
            ),
            (
                '{"input_ids": [1, 320], "prompt_length": 1}',
                "token id 320 is outside the target's vocabulary, 0 to 319",
            ),
        ],
    )
    def test_malformed_line_is_named(self, tmp_path: Path, line: str, reason: str) -> None:
        """One malformed line is an error that names file, line, reason and remedy."""
        with pytest.raises(ValueError, match=rf"data\.jsonl:2: .*{reason}.*; each line must be \{{"):
            read(tmp_path, ['{"prompt": "why?", "response": "one two"}', line])

    def test_refused_conversation_is_named(self, tmp_path: Path) -> None:
        """A conversation that the template refuses is reported like any malformed line."""
        path = tmp_path / "data.jsonl"
        roles = [{"role": role, "content": "one two"} for role in ("system", "user", "assistant")]
        path.write_text(json.dumps({"conversations": roles}))
        reader = SampleReader(tiny_tokenizer(NO_SYSTEM), eos_token_ids=EOS, vocab_size=320, max_length=64)

        with pytest.raises(ValueError, match=r"data\.jsonl:1: .*refuses the conversation \(no system role\)"):
            reader.read(path)

    def test_file_without_samples_says_why(self, tmp_path: Path) -> None:
        """A file that leaves nothing to train on is an error with the counts."""
        with pytest.raises(ValueError, match=r"no usable sample \(2 unsupervised\)"):
            read(tmp_path, [{"input_ids": [1], "prompt_length": 0}] * 2)

    def test_missing_file_is_an_error(self, tmp_path: Path) -> None:
        """A missing file is named with its setting."""
        reader = SampleReader(tiny_tokenizer(), eos_token_ids=EOS, vocab_size=320, max_length=8)

        with pytest.raises(ValueError, match=r"data\.path .*absent\.jsonl: No such file"):
            reader.read(tmp_path / "absent.jsonl")


class TestSplit:
    """Setting samples aside."""

    def test_is_a_partition_and_repeats(self, tmp_path: Path) -> None:
        """Every sample is in one part, and the same seed gives the same parts."""
        dataset = read(tmp_path, [{"input_ids": [i, i, i], "prompt_length": 1} for i in range(10)])
        train, held_out = dataset.split(3, seed=5)
        again = dataset.split(3, seed=5)

        assert len(held_out) == 3
        assert {id(sample) for sample in (*train, *held_out)} == {id(sample) for sample in dataset.samples}
        assert again == (train, held_out)

    def test_must_leave_something_to_train_on(self, tmp_path: Path) -> None:
        """Holding out everything is an error that names the setting."""
        dataset = read(tmp_path, [{"input_ids": [1, 1, 1], "prompt_length": 1}] * 3)

        with pytest.raises(ValueError, match=r"evaluation\.num_prompts 3: the data has only 3 samples"):
            dataset.split(3, seed=0)
