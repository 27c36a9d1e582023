"""The embedded target: a small language model made on the spot, so that a fresh clone trains without any download.

A byte-pair tokenizer and a Qwen3 model are trained on the language reference that ships with CPython, and written as an
ordinary Hugging Face directory that `Target.load` takes like any other. Beside it lie the drafter's training data, the
model's own greedy continuations of pieces of that text, and prompts for the evaluation, taken from topics that neither
the tokenizer, the model nor the drafter has seen.

The directory's name holds a digest of everything that shapes its content, so it is never stale, and it is built under
another name and renamed, so it is never half there.
"""

import hashlib
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics

import msgspec
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from trainer.regenerate import generate_greedy
from trainer.target import Target

EOS_TOKEN = "<|end|>"  # noqa: S105 - a token of text, not a secret
MASK_TOKEN = "<|mask|>"  # noqa: S105 - the same
# A model that only ever continues text: turns are simply joined.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
TRAIN_FILE = "train.jsonl"
EVALUATION_FILE = "evaluation.jsonl"


@dataclass(frozen=True, kw_only=True)
class EmbeddedRecipe:
    """How the model and its data are made; the default takes about a minute and a half on two cores."""

    vocab_size: int = 512
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 4
    head_dim: int = 32
    max_positions: int = 1024

    num_steps: int = 160
    batch_size: int = 32
    window: int = 128
    """Tokens of one training sequence."""
    matrix_learning_rate: float = 0.01
    """Of the layers' matrices, which Muon updates: it needs a third of the steps that AdamW does here."""
    learning_rate: float = 0.01
    """Of the embedding and the norms, which AdamW updates."""
    seed: int = 0

    held_out_stride: int = 12
    """Every so manieth topic is kept for the evaluation."""
    num_samples: int = 2048
    """Continuations the drafter is trained on."""
    num_evaluation_prompts: int = 64
    prompt_tokens: int = 32
    response_tokens: int = 96
    generation_batch_size: int = 256


@dataclass(frozen=True, kw_only=True)
class EmbeddedTarget:
    """Where everything lies.

    Attributes:
        directory: The model, for `target.path`.
        data_path: Training samples, for `data.path`.
        evaluation_path: Samples of held-out topics, for `evaluation.path`.
    """

    directory: Path
    data_path: Path
    evaluation_path: Path


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """Return the directory where embedded targets are kept: `$XDG_CACHE_HOME/dflash`, or under `~/.cache`."""
    home = environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "dflash"


def embedded_target(
    cache_dir: Path,
    recipe: EmbeddedRecipe | None = None,
    on_progress: Callable[[str], None] = lambda _line: None,
) -> EmbeddedTarget:
    """Return the embedded target, building it first unless the cache holds it.

    Builds of the same recipe may run side by side; the first to finish wins.

    Args:
        cache_dir: Created where needed.
        recipe: Default: the full-size one.
        on_progress: Told one line now and then while building.

    Raises:
        ValueError: The cache directory cannot be written.
    """
    recipe = recipe or EmbeddedRecipe()
    directory = cache_dir / f"embedded-{_digest(recipe)}"
    if not directory.is_dir():
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=".building-", dir=cache_dir))
        except OSError as error:
            raise ValueError(
                f"cache {cache_dir}: {error.strerror}; set XDG_CACHE_HOME to a writable directory"
            ) from error
        try:
            _build(partial, recipe, on_progress)
            _rename_unless_there(partial, directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return EmbeddedTarget(
        directory=directory, data_path=directory / TRAIN_FILE, evaluation_path=directory / EVALUATION_FILE
    )


def split_topics(stride: int) -> tuple[list[str], list[str]]:
    """Return the texts of the topics to train on, and of the held-out ones."""
    names = sorted(topics)
    held_out = set(names[::stride])
    return [topics[n] for n in names if n not in held_out], [topics[n] for n in names if n in held_out]


def _digest(recipe: EmbeddedRecipe) -> str:
    versions = {name: version(name) for name in ("tokenizers", "torch", "transformers")}
    shape = hashlib.sha256(msgspec.json.encode([asdict(recipe), versions, topics], order="deterministic"))
    shape.update(Path(__file__).read_bytes())
    return shape.hexdigest()[:16]


def _rename_unless_there(partial: Path, directory: Path) -> None:
    try:
        partial.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise


def _build(directory: Path, recipe: EmbeddedRecipe, on_progress: Callable[[str], None]) -> None:
    # Process-wide, as in `Target.load`: a bar for one small file would only tear the progress lines.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    train_texts, held_out_texts = split_topics(recipe.held_out_stride)
    tokenizer = _train_tokenizer(train_texts, recipe)
    train_docs = [tokenizer(text)["input_ids"] for text in train_texts]
    held_out_docs = [tokenizer(text)["input_ids"] for text in held_out_texts]
    model = _train_model(train_docs, tokenizer, recipe, on_progress)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    target = Target(model, tokenizer, layer_ids=[0])
    generator = torch.Generator().manual_seed(recipe.seed)
    for docs, number, name in (
        (train_docs, recipe.num_samples, TRAIN_FILE),
        (held_out_docs, recipe.num_evaluation_prompts, EVALUATION_FILE),
    ):
        prompts = _draw_pieces(docs, number, recipe.prompt_tokens, generator)
        with (directory / name).open("wb") as file:
            for start in range(0, number, recipe.generation_batch_size):
                chunk = prompts[start : start + recipe.generation_batch_size]
                answers = generate_greedy(target, chunk, recipe.response_tokens)
                for prompt, answer in zip(chunk, answers, strict=True):
                    record = {"input_ids": prompt + answer, "prompt_length": len(prompt)}
                    file.write(msgspec.json.encode(record) + b"\n")
                on_progress(f"embedded target: {name} {start + len(chunk)}/{number} answers")


def _train_tokenizer(texts: Sequence[str], recipe: EmbeddedRecipe) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=[EOS_TOKEN, MASK_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=EOS_TOKEN, mask_token=MASK_TOKEN, chat_template=CHAT_TEMPLATE
    )


def _train_model(
    docs: Sequence[list[int]],
    tokenizer: PreTrainedTokenizerFast,
    recipe: EmbeddedRecipe,
    on_progress: Callable[[str], None],
) -> Qwen3ForCausalLM:
    """Train on windows of the documents laid end to end, with an end token after each."""
    stream = torch.tensor([token for doc in docs for token in [*doc, tokenizer.eos_token_id]])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = Qwen3ForCausalLM(_model_config(len(tokenizer), tokenizer, recipe))
    optimizers = _optimizers(model, recipe)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: _rate(step, recipe.num_steps)) for o in optimizers]
    generator = torch.Generator().manual_seed(recipe.seed)
    for step in range(recipe.num_steps):
        starts = torch.randint(len(stream) - recipe.window, (recipe.batch_size, 1), generator=generator)
        windows = stream[starts + torch.arange(recipe.window + 1)]
        # float32: bfloat16 gains a fifth where the CPU has instructions for it, and is many times slower elsewhere.
        logits = model(windows[:, :-1], use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad()
        if step % 20 == 0 or step == recipe.num_steps - 1:
            on_progress(f"embedded target: step {step + 1}/{recipe.num_steps} loss {loss.item():.2f}")
    return model


def _model_config(vocab_size: int, tokenizer: PreTrainedTokenizerFast, recipe: EmbeddedRecipe) -> Qwen3Config:
    num_heads = recipe.hidden_size // recipe.head_dim
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=max(1, num_heads // 2),
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )


def _optimizers(model: nn.Module, recipe: EmbeddedRecipe) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers." in name]  # noqa: PLR2004
    others = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "layers." in name)]  # noqa: PLR2004
    return [
        torch.optim.Muon(matrices, lr=recipe.matrix_learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01),
    ]


def _rate(step: int, num_steps: int) -> float:
    """Warm up over the first steps, hold, and fall to zero over the second half."""
    return min(1.0, (step + 1) / 20, 2 * (1 - step / num_steps))


def _draw_pieces(docs: Sequence[list[int]], number: int, length: int, generator: torch.Generator) -> list[list[int]]:
    """Draw pieces evenly from all places of all documents, none twice while they last."""
    places = [(doc, start) for doc in docs for start in range(len(doc) - length)]
    repeats = math.ceil(number / len(places))
    order = torch.cat([torch.randperm(len(places), generator=generator) for _ in range(repeats)])
    return [places[i][0][places[i][1] : places[i][1] + length] for i in order[:number].tolist()]
