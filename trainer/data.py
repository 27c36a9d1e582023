"""Training samples: from a JSONL file to token ids with a loss mask.

Three kinds of line are read, in any mix, one JSON object each:
`{"conversations": [{"role": ..., "content": ...}, ...]}`, `{"prompt": ..., "response": ...}`, and, when the tokens
themselves must survive, `{"input_ids": [...], "prompt_length": n}`.

Text is rendered with the target's own chat template, since a drafter only learns what the target will really be asked.
Which tokens are the assistant's is not guessed from one family's markers: every assistant turn is rendered with and
without its answer, and where the two renderings part, the answer begins. That holds for any template, also for one
that rewrites earlier turns (then those turns lose supervision, never the wrong tokens gain it).

A line of text may say `"complete": false`: its last answer was cut at a length limit, so the end that the template
writes after it is not the target's and is not supervised.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from pathlib import Path

import msgspec
import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

LINE_FORMS = (
    '{"conversations": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}, '
    '{"prompt": "...", "response": "..."} or {"input_ids": [...], "prompt_length": n}'
)


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str


class _Conversation(msgspec.Struct, frozen=True):
    conversations: list[Message]
    complete: bool = True


class _Exchange(msgspec.Struct, frozen=True):
    prompt: str
    response: str
    complete: bool = True


class _Tokens(msgspec.Struct, frozen=True):
    input_ids: list[int]
    prompt_length: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One sequence to train on.

    Attributes:
        input_ids: Token ids [S], int64.
        loss_mask: True at the target's own tokens [S], bool.
    """

    input_ids: Tensor
    loss_mask: Tensor

    @property
    def prompt_ids(self) -> list[int]:
        """Everything before the first supervised token, to be answered anew in an evaluation."""
        return self.input_ids[: int(self.loss_mask.int().argmax())].tolist()

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """What a file gave.

    Attributes:
        samples: In the order of the file.
        skipped: How many lines were refused, by reason: `unsupervised` (no two consecutive assistant tokens, so
            nothing to draft) and `truncated` (the answer lies beyond the length limit).
    """

    samples: tuple[Sample, ...]
    skipped: Counter[str] = field(default_factory=Counter)

    def split(self, num_held_out: int, seed: int) -> tuple[tuple[Sample, ...], tuple[Sample, ...]]:
        """Set samples aside for evaluation, the same ones for the same seed.

        Returns:
            Training samples and held-out samples.

        Raises:
            ValueError: Nothing would be left to train on.
        """
        if num_held_out >= len(self.samples):
            raise ValueError(
                f"evaluation.num_prompts {num_held_out}: the data has only {len(self.samples)} samples, "
                "none would be left to train on; hold out fewer or give more data"
            )
        order = torch.randperm(len(self.samples), generator=torch.Generator().manual_seed(seed)).tolist()
        held_out = set(order[:num_held_out])
        return (
            tuple(sample for i, sample in enumerate(self.samples) if i not in held_out),
            tuple(sample for i, sample in enumerate(self.samples) if i in held_out),
        )


class ConversationRenderer:
    """Turns conversations into token ids with the target's chat template.

    Args:
        tokenizer: The target's, with a chat template and character offsets (a fast tokenizer).
        eos_token_ids: Tokens that end a response. What a template writes after one (often a newline) is not
            supervised, because the target stops there.

    Raises:
        ValueError: The tokenizer has no chat template or no offsets.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: frozenset[int]) -> None:
        if tokenizer.chat_template is None:
            raise ValueError(
                "target.path: the tokenizer has no chat template; put a chat_template.jinja beside it, "
                'or give data.path in the form {"input_ids": [...], "prompt_length": n}'
            )
        if not tokenizer.is_fast:
            raise ValueError(
                "target.path: the tokenizer gives no character offsets; use a target with a tokenizer.json"
            )
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids after which the target's answer to these messages begins.

        Raises:
            ValueError: The template refuses the messages.
        """
        encoded = self._tokenizer(self._text(messages, answer_next=True), add_special_tokens=False)
        return list(encoded["input_ids"])

    def sample(self, messages: Sequence[Message], *, complete: bool = True) -> Sample:
        """Return the whole conversation with the assistant's turns supervised.

        Args:
            messages: The turns.
            complete: Whether the last answer ends where the target ended it. Else it was cut, and the end that the
                template writes is not the target's.

        Raises:
            ValueError: The template refuses the messages.
        """
        text = self._text(messages, answer_next=False)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids: list[int] = encoded["input_ids"]
        offsets: list[tuple[int, int]] = encoded["offset_mapping"]
        loss_mask = torch.zeros(len(ids), dtype=torch.bool)
        for turn, message in enumerate(messages):
            if message.role != "assistant":
                continue
            start, end = self._answer_span(messages, turn, text)
            inside = [i for i, (left, right) in enumerate(offsets) if start <= left < right <= end]
            last_eos = max((i for i in inside if ids[i] in self._eos_token_ids), default=len(ids))
            ended = complete or turn < len(messages) - 1
            loss_mask[[i for i in inside if i < last_eos + ended]] = True
        return Sample(input_ids=torch.tensor(ids), loss_mask=loss_mask)

    def _answer_span(self, messages: Sequence[Message], turn: int, text: str) -> tuple[int, int]:
        """Return the characters of `text` that are the answer of one assistant turn."""
        asked = self._text(messages[:turn], answer_next=True)
        answered = self._text(messages[: turn + 1], answer_next=False)
        return _num_common(asked, answered), _num_common(answered, text)

    def _text(self, messages: Sequence[Message], *, answer_next: bool) -> str:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=answer_next),
            )
        except TemplateError as error:
            raise ValueError(
                f"the target's chat template refuses the conversation ({error}); change its roles or their order"
            ) from error


class SampleReader:
    """Reads JSONL files of samples for one target.

    Args:
        tokenizer: The target's.
        eos_token_ids: Tokens that end a response.
        vocab_size: Rows of the target's embedding table.
        max_length: Longer samples are cut off here, in tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        max_length: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._max_length = max_length
        self._renderer: ConversationRenderer | None = None

    def read(self, path: Path, num_samples: int | None = None) -> Dataset:
        """Read the samples of a file.

        Args:
            path: JSONL file; blank lines are ignored.
            num_samples: Stop after so many usable samples; None reads them all.

        Raises:
            ValueError: No such file, a malformed line (named with its number), or no usable sample.
        """
        samples: list[Sample] = []
        skipped: Counter[str] = Counter()
        for number, line in read_lines(path, "data.path"):
            if num_samples is not None and len(samples) == num_samples:
                break
            try:
                sample = self._parse(line)
            except (msgspec.MsgspecError, ValueError) as error:
                raise ValueError(f"{path}:{number}: {error}; each line must be {LINE_FORMS}") from error
            reason = self._why_unusable(sample)
            if reason is None:
                samples.append(self._truncate(sample))
            else:
                skipped[reason] += 1
        if not samples:
            counts = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items())) or "the file is empty"
            raise ValueError(f"data.path {path}: no usable sample ({counts}); each line must be {LINE_FORMS}")
        return Dataset(samples=tuple(samples), skipped=skipped)

    def _parse(self, line: bytes) -> Sample:
        record = msgspec.json.decode(line)
        if isinstance(record, dict) and "input_ids" in record:
            return self._from_tokens(msgspec.convert(record, _Tokens))
        if isinstance(record, dict) and "prompt" in record:
            exchange = msgspec.convert(record, _Exchange)
            turns = [Message("user", exchange.prompt), Message("assistant", exchange.response)]
            conversation = _Conversation(turns, complete=exchange.complete)
        else:
            conversation = msgspec.convert(record, _Conversation)
        if self._renderer is None:
            self._renderer = ConversationRenderer(self._tokenizer, self._eos_token_ids)
        return self._renderer.sample(conversation.conversations, complete=conversation.complete)

    def _from_tokens(self, tokens: _Tokens) -> Sample:
        outside = [i for i in tokens.input_ids if not 0 <= i < self._vocab_size]
        if outside:
            raise ValueError(f"token id {outside[0]} is outside the target's vocabulary, 0 to {self._vocab_size - 1}")
        input_ids = torch.tensor(tokens.input_ids, dtype=torch.int64)
        return Sample(input_ids=input_ids, loss_mask=torch.arange(len(input_ids)) >= tokens.prompt_length)

    def _truncate(self, sample: Sample) -> Sample:
        return Sample(input_ids=sample.input_ids[: self._max_length], loss_mask=sample.loss_mask[: self._max_length])

    def _why_unusable(self, sample: Sample) -> str | None:
        if not _has_pair(sample.loss_mask):
            return "unsupervised"
        return None if _has_pair(sample.loss_mask[: self._max_length]) else "truncated"


def read_lines(path: Path, key: str) -> list[tuple[int, bytes]]:
    """Return the lines of a file that are not blank, with their numbers from 1.

    Args:
        path: The file.
        key: The setting that named it, for the error.

    Raises:
        ValueError: The file cannot be read.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{key} {path}: {error.strerror}; give a readable file") from error
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _has_pair(loss_mask: Tensor) -> bool:
    return bool((loss_mask[:-1] & loss_mask[1:]).any())


def _num_common(left: str, right: str) -> int:
    return len(commonprefix([left, right]))  # noqa: RUF071 - texts, so by character is what is wanted
