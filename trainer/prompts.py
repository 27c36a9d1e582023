"""Prompts for a target that comes without data, and its answers to them.

A drafter learns from what its target says, so prompts alone are enough to start with any instruction-tuned model.
The answers are kept in the cache directory, under a name that changes with the target, the prompts and the limits.
"""

import hashlib
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import msgspec

from trainer.data import Message
from trainer.regenerate import regenerate
from trainer.target import Target, locate

FORMS = (
    "Explain {} to a beginner.",
    "What are common misconceptions about {}?",
    "List five facts about {}.",
    "Write a short story about {}.",
    "Why is it important to understand {}?",
    "Give step-by-step advice about {}.",
    "Summarize the history of {} in one paragraph.",
    "Write a short dialogue between two friends about {}.",
    "What should a teacher tell children about {}?",
    "Compare two different opinions on {}.",
    "Write an email to a colleague about {}.",
    "What would change in the world without {}?",
)
SUBJECTS = (
    "volcanoes", "sailing boats", "sourdough bread", "railway stations", "solar panels", "honey bees", "chess",
    "glaciers", "public libraries", "wind instruments", "paper making", "hash tables", "the printing press",
    "mountain hiking", "vaccines", "street markets", "compilers", "coral reefs", "fairy tales", "earthquakes",
    "bicycles", "tea", "the Silk Road", "photography", "recycling", "prime numbers", "night trains",
    "vegetable gardens", "sleep", "bridges", "medieval towns", "computer networks", "rainbows", "saving money",
    "the Moon", "folk dance", "cheese", "lighthouses", "probability", "job interviews", "desert animals",
    "electric cars", "poetry", "sorting algorithms", "rivers", "museums", "running a marathon", "ancient Egypt",
    "wool", "weather forecasts",
)  # fmt: skip


def built_in_prompts(number: int) -> list[str]:
    """Return the first prompts of a fixed, well mixed list of 600; fewer if it is not that long."""
    prompts = [form.format(subject) for form, subject in itertools.product(FORMS, SUBJECTS)]
    random.Random("prompts").shuffle(prompts)  # noqa: S311 - an order, not a secret
    return prompts[:number]


def answered_prompts(
    target: Target,
    target_path: str,
    cache_dir: Path,
    *,
    num_prompts: int,
    max_new_tokens: int,
    on_progress: Callable[[str], None] = lambda _line: None,
) -> Path:
    """Return a file for `data.path` with the target's answers to the built-in prompts, made unless it is in the cache.

    Args:
        target: Answers.
        target_path: Where it was loaded from, as for `locate`.
        cache_dir: Created where needed.
        num_prompts: How many to answer, 600 at most.
        max_new_tokens: Longest answer.
        on_progress: Told one line after each batch.

    Raises:
        ValueError: The cache directory cannot be written, or the target has no chat template.
    """
    prompts = built_in_prompts(num_prompts)
    path = cache_dir / f"answers-{_digest(target, target_path, prompts, max_new_tokens)}.jsonl"
    if not path.is_file():
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"cache {cache_dir}: {error.strerror}; set XDG_CACHE_HOME to a writable directory"
            ) from error
        regenerate(
            target,
            [[Message("user", prompt)] for prompt in prompts],
            path,
            max_new_tokens=max_new_tokens,
            batch_size=32,
            on_progress=lambda done, total: on_progress(f"the target answers built-in prompts: {done}/{total}"),
        )
    return path


def _digest(target: Target, target_path: str, prompts: list[str], max_new_tokens: int) -> str:
    """Digest what shapes the answers; a model file stands by its size and time, as reading it would take too long."""
    directory, gguf_name = locate(target_path)
    files = [directory / gguf_name] if gguf_name else sorted(path for path in directory.iterdir() if path.is_file())
    stamps = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    shape = msgspec.json.encode([stamps, str(target.model.dtype), prompts, max_new_tokens])
    return hashlib.sha256(shape).hexdigest()[:16]
