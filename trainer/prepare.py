"""What a run works on: the target, the samples to train on and the prompts held back for the evaluation."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedTokenizerBase

from trainer.config import TrainerConfig
from trainer.data import Sample, SampleReader
from trainer.drafter_config import DrafterConfig
from trainer.drafter_worker import TORCH_DTYPES
from trainer.embedded_target import default_cache_dir, embedded_target
from trainer.geometry import drafter_config, layer_ids
from trainer.prompts import answered_prompts
from trainer.target import Target, locate

EMBEDDED = "embedded"


@dataclass(frozen=True, kw_only=True)
class Materials:
    """Everything a run is built from."""

    targets: Sequence[Target]
    """One for each target worker, equal but for the device."""
    geometry: DrafterConfig
    samples: Sequence[Sample]
    prompts: Sequence[list[int]]
    """Token ids of held-out prompts."""
    skipped: Counter[str]
    """Samples that are not trained on, by reason."""

    @property
    def target(self) -> Target:
        """The first of the targets."""
        return self.targets[0]


def prepare(
    config: TrainerConfig, environ: Mapping[str, str], say: Callable[[str], None], devices: Sequence[torch.device]
) -> Materials:
    """Load or make the target and its data.

    Args:
        config: settings of the run.
        environ: names the cache directory of the embedded target.
        say: told one line now and then while something is made.
        devices: where the targets run.

    Raises:
        ValueError: a path, a key or a line of data that cannot be used, with the remedy.
    """
    embedded = config.target.path == EMBEDDED and embedded_target(default_cache_dir(environ), on_progress=say)
    path = str(embedded.directory) if embedded else config.target.path
    # Loaded once for each: hooks write into a target, so it belongs to one thread.
    targets = [load_target(config, path, device) for device in devices]
    target = targets[0]
    geometry = drafter_config(target, config.drafter)
    reader = SampleReader(
        target.tokenizer,
        eos_token_ids=target.eos_token_ids,
        vocab_size=target.vocab_size,
        max_length=config.data.max_length,
    )
    if config.data.path:
        data_path = Path(config.data.path)
    elif embedded:
        data_path = embedded.data_path
    else:
        data_path = _answers(config, target, environ, say)
    say(f"reading {data_path}")
    dataset = reader.read(data_path)
    held_out: Sequence[Sample]
    if embedded and not config.data.path:
        samples, held_out = dataset.samples, reader.read(embedded.evaluation_path).samples
    else:
        samples, held_out = dataset.split(config.data.num_held_out, config.train.seed)
    return Materials(
        targets=targets,
        geometry=geometry,
        samples=samples,
        prompts=[sample.prompt_ids for sample in held_out],
        skipped=dataset.skipped,
    )


def _answers(config: TrainerConfig, target: Target, environ: Mapping[str, str], say: Callable[[str], None]) -> Path:
    return answered_prompts(
        target,
        config.target.path,
        default_cache_dir(environ),
        num_prompts=config.data.num_prompts,
        max_new_tokens=config.data.max_new_tokens,
        on_progress=say,
    )


def target_path(config: TrainerConfig, environ: Mapping[str, str], say: Callable[[str], None]) -> str:
    """Where the target lies, making the embedded one first where that is asked for."""
    if config.target.path != EMBEDDED:
        return config.target.path
    return str(embedded_target(default_cache_dir(environ), on_progress=say).directory)


def load_target(config: TrainerConfig, path: str, device: torch.device) -> Target:
    """Load a target with the taps that the settings ask for; raises ValueError."""
    locate(path)
    dtype = TORCH_DTYPES[config.target.dtype]
    if config.target.layer_ids:
        return Target.load(path, layer_ids=config.target.layer_ids, dtype=dtype, device=device)
    # How many layers there are is only known once it is loaded, and taps are cheap to move.
    target = Target.load(path, layer_ids=(0,), dtype=dtype, device=device)
    return Target(target.model, target.tokenizer, layer_ids(config.target, target.num_layers))


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """What tells one tokenizer from another: every token with its id, and the chat template."""
    known = [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template]
    return hashlib.sha256(msgspec.json.encode(known)).hexdigest()
