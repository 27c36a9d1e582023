"""The target's own greedy answers: what a drafter is trained on.

A drafter is judged by how often the target agrees with it, so it must learn what the target says, not what the author
of a data set wrote. So every assistant turn of a conversation is answered anew, each on top of the target's own
earlier answers. Generation is greedy and in batches, padded on the left so that all texts grow at the right.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from trainer.data import ConversationRenderer, Message, read_lines
from trainer.target import Target

PROMPT_FORMS = '{"prompt": "..."} or {"conversations": [{"role": "user", "content": "..."}]}'


class _Prompt(msgspec.Struct, frozen=True):
    prompt: str


class _Conversation(msgspec.Struct, frozen=True):
    conversations: list[Message]


@dataclass(kw_only=True)
class _Dialogue:
    """A conversation being answered turn by turn: what is said, and what is still to be asked."""

    questions: list[list[Message]]
    said: list[Message] = field(default_factory=list)
    complete: bool = True
    stopped: str | None = None

    def ask(self) -> list[Message]:
        """Return the conversation up to the next question."""
        return [*self.said, *self.questions[0]]

    def answer(self, text: str, *, complete: bool) -> None:
        """Add the target's answer; one that was cut ends the dialogue."""
        if not text:
            self.stopped = "empty"
            return
        self.said = [*self.ask(), Message("assistant", text)]
        self.questions = self.questions[1:] if complete else []
        self.complete = complete

    @property
    def open(self) -> bool:
        """Whether there is something left to ask."""
        return bool(self.questions) and self.stopped is None


@dataclass(frozen=True, kw_only=True)
class RegenerateReport:
    """What became of the prompts: `num_written` and all of `skipped` add up to the number of prompts.

    Attributes:
        num_written: Answered prompts, one line each.
        skipped: Prompts without a line, by reason: `refused` (by the chat template), `too_long` (for the target's
            positions) and `empty` (the target ended at once).
    """

    num_written: int
    skipped: Counter[str]


def read_prompts(path: Path) -> list[list[Message]]:
    """Read a text file with one prompt a line, or a `.jsonl` file of prompts or conversations.

    Raises:
        ValueError: No such file, no prompt in it, or a malformed line (named with its number).
    """
    lines = read_lines(path, "prompts")
    if path.suffix == ".jsonl":
        prompts = [_parse_prompt(path, number, line) for number, line in lines]
    else:
        prompts = [[Message("user", line.decode(errors="replace").strip())] for _number, line in lines]
    if not prompts:
        raise ValueError(f"prompts {path}: the file is empty; give one prompt a line")
    return prompts


def regenerate(
    target: Target,
    prompts: Sequence[Sequence[Message]],
    out_path: Path,
    *,
    max_new_tokens: int,
    batch_size: int,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> RegenerateReport:
    """Answer prompts greedily and write them as a JSONL file that `data.path` takes.

    Lines keep the order of the prompts: `{"prompt", "response"}`, or `{"conversations"}` where there was more than one
    turn. An answer cut at `max_new_tokens` ends its conversation and is marked `"complete": false`; so does one that
    cannot be given. The file appears when all are answered, or not at all.

    Args:
        target: Answers; its chat template renders the prompts.
        prompts: From `read_prompts`; assistant turns in them are replaced.
        out_path: JSONL file to write; replaced if it exists.
        max_new_tokens: Longest answer.
        batch_size: Prompts answered at a time.
        on_progress: Called after each batch with the prompts done and their total.

    Raises:
        ValueError: The file cannot be written, or the target has no chat template.
    """
    renderer = ConversationRenderer(target.tokenizer, target.eos_token_ids)
    partial_path = out_path.with_name(f"{out_path.name}.partial")
    num_written, skipped = 0, Counter[str]()
    try:
        with partial_path.open("wb") as file:
            for start in range(0, len(prompts), batch_size):
                chunk = prompts[start : start + batch_size]
                for line in _answer(target, renderer, chunk, max_new_tokens):
                    if isinstance(line, bytes):
                        file.write(line)
                        num_written += 1
                    else:
                        skipped[line] += 1
                on_progress(start + len(chunk), len(prompts))
        partial_path.replace(out_path)
    except OSError as error:
        raise ValueError(f"{out_path}: {error.strerror}; choose a writable file in an existing directory") from error
    finally:
        partial_path.unlink(missing_ok=True)
    return RegenerateReport(num_written=num_written, skipped=skipped)


@torch.no_grad()
def generate_greedy(target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """Continue prompts by the target's likeliest tokens, all in one batch.

    Args:
        target: Generates.
        prompts: Token ids, at least one each.
        max_new_tokens: Most tokens to add.

    Returns:
        The new tokens of each prompt, up to and with the one that ends the response.
    """
    input_ids, attention_mask = _pad_left(prompts, target.device)
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    # Without padding the plain causal kernel serves, which is faster than one with a mask.
    padded = not bool(attention_mask.all())
    ends = torch.tensor(sorted(target.eos_token_ids), device=target.device)
    finished = torch.zeros(len(prompts), dtype=torch.bool, device=target.device)
    cache = target.new_cache()
    columns: list[Tensor] = []
    while len(columns) < max_new_tokens and not bool(finished.all()):
        output = target.forward(
            input_ids,
            attention_mask=attention_mask if padded else None,
            position_ids=position_ids,
            cache=cache,
        )
        input_ids = target.logits(output.hidden[:, -1:]).argmax(dim=-1)
        columns.append(input_ids)
        finished |= torch.isin(input_ids[:, 0], ends)
        attention_mask = torch.cat([attention_mask, torch.ones_like(input_ids)], dim=1)
        position_ids = position_ids[:, -1:] + 1
    rows: list[list[int]] = torch.cat(columns, dim=1).tolist() if columns else [[] for _ in prompts]
    return [_cut_after_end(row, target.eos_token_ids) for row in rows]


def _answer(
    target: Target, renderer: ConversationRenderer, prompts: Sequence[Sequence[Message]], max_new_tokens: int
) -> Iterator[bytes | str]:
    """Yield for each prompt its line, or the reason why there is none."""
    dialogues = [_Dialogue(questions=_questions(messages)) for messages in prompts]
    while waiting := [dialogue for dialogue in dialogues if dialogue.open]:
        asked = [_render(target, renderer, dialogue, max_new_tokens) for dialogue in waiting]
        prompt_ids = [ids for ids in asked if ids is not None]
        answers = generate_greedy(target, prompt_ids, max_new_tokens) if prompt_ids else []
        answerable = [dialogue for dialogue, ids in zip(waiting, asked, strict=True) if ids is not None]
        for dialogue, tokens in zip(answerable, answers, strict=True):
            complete = bool(tokens) and tokens[-1] in target.eos_token_ids
            text = target.tokenizer.decode(tokens[:-1] if complete else tokens, skip_special_tokens=True)
            dialogue.answer(str(text), complete=complete)
    for dialogue in dialogues:
        yield _encode(dialogue) if dialogue.said else dialogue.stopped or "empty"


def _questions(messages: Sequence[Message]) -> list[list[Message]]:
    """Split a conversation at its assistant turns, which are dropped."""
    questions: list[list[Message]] = [[]]
    for message in messages:
        if message.role == "assistant":
            questions.append([])
        else:
            questions[-1].append(message)
    return [question for question in questions if question]


def _render(
    target: Target, renderer: ConversationRenderer, dialogue: _Dialogue, max_new_tokens: int
) -> list[int] | None:
    """Return the token ids of the next question, or None and stop the dialogue."""
    try:
        prompt_ids = renderer.prompt_ids(dialogue.ask())
    except ValueError:
        dialogue.stopped = "refused"
        return None
    if target.max_positions is not None and len(prompt_ids) + max_new_tokens > target.max_positions:
        dialogue.stopped = "too_long"
        return None
    return prompt_ids


def _encode(dialogue: _Dialogue) -> bytes:
    record: dict[str, object]
    if [message.role for message in dialogue.said] == ["user", "assistant"]:
        record = {"prompt": dialogue.said[0].content, "response": dialogue.said[1].content}
    else:
        record = {"conversations": dialogue.said}
    if not dialogue.complete:
        record["complete"] = False
    return msgspec.json.encode(record) + b"\n"


def _parse_prompt(path: Path, number: int, line: bytes) -> list[Message]:
    try:
        record = msgspec.json.decode(line)
        if isinstance(record, dict) and "prompt" in record:
            return [Message("user", msgspec.convert(record, _Prompt).prompt)]
        messages = msgspec.convert(record, _Conversation).conversations
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}:{number}: {error}; each line must be {PROMPT_FORMS}") from error
    if not any(message.role == "user" for message in messages):
        raise ValueError(f"{path}:{number}: no user turn to answer; each line must be {PROMPT_FORMS}")
    return messages


def _pad_left(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    length = max(len(prompt) for prompt in prompts)
    input_ids = torch.tensor([[0] * (length - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    num_padding = torch.tensor([length - len(prompt) for prompt in prompts], device=device)
    return input_ids, (torch.arange(length, device=device) >= num_padding[:, None]).long()


def _cut_after_end(tokens: list[int], eos_token_ids: frozenset[int]) -> list[int]:
    end = next((i for i, token in enumerate(tokens) if token in eos_token_ids), len(tokens))
    return tokens[: end + 1]
