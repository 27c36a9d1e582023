"""The frozen target model: where it is loaded from, which layers are tapped, what it lends to the drafter.

A drafter reads the outputs of a few decoder layers of the target and borrows its embedding table and head. Layer id i
means the output of decoder layer i (0-based, before the final norm), as in published DFlash checkpoints. Forward hooks
read exactly that for every architecture, where the hidden states that transformers returns would cost all layers'
memory and hold the final norm's output in the last place.

The base model runs without its head: training needs no logits, and at 248,320 tokens they would dwarf the features.

Tensor suffixes: B sequences, S positions, H hidden size, V vocabulary.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    DynamicCache,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from trainer.target_scales import check_head, head_scale
from trainer.tiled_head import head_logits

PACKAGE_PREFIX = "package:"


@dataclass(frozen=True, kw_only=True)
class TargetOutput:
    """What one forward pass gives.

    Attributes:
        layers: Outputs of the tapped layers [B, S, H], in the order of the layer ids.
        hidden: Output of the final norm, which `Target.logits` turns into logits.
    """

    layers: tuple[Tensor, ...]
    hidden: Tensor


class Target:
    """A frozen causal language model with tapped decoder layers.

    One instance belongs to one thread at a time: the hooks write into the instance.

    Args:
        model: A causal LM of transformers; it is frozen and put into evaluation mode.
        tokenizer: Its tokenizer.
        layer_ids: Decoder layers to tap, 0-based.

    Raises:
        ValueError: The model has no decoder layers to tap, or not these, or a head that cannot be borrowed.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, layer_ids: Sequence[int]) -> None:
        self.model = model.requires_grad_(False)
        self.model.train(mode=False)
        self.tokenizer = tokenizer
        self.layer_ids = tuple(layer_ids)
        self._decoder = cast("nn.Module", model.get_decoder())  # type: ignore[no-untyped-call]
        self._head = check_head(model)
        layers = getattr(self._decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise ValueError(  # noqa: TRY004 - the user chose the target
                f"target.path: {type(model).__name__} has no list of decoder layers to tap; use another target"
            )
        self.num_layers = len(layers)
        self._check_layer_ids()
        # None between passes of our own, so that others who run the model leave nothing behind.
        self._taps: dict[int, Tensor] | None = None
        for layer_id in self.layer_ids:
            layers[layer_id].register_forward_hook(self._make_tap(layer_id))

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        layer_ids: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Load a local Hugging Face directory, or the GGUF file in one, onto a device.

        Args:
            path: As for `locate`.
            layer_ids: Decoder layers to tap, 0-based.
            dtype: Of the weights and of the features.
            device: Where the model runs.

        Raises:
            ValueError: Nothing there, not a model, damaged, or without the tapped layers.
        """
        directory, gguf_name = locate(path)
        # Process-wide, and wanted so: the bars would tear the trainer's own progress line.
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        # GGUF blocks are unpacked: the drafter borrows the embedding table as a plain tensor.
        gguf = {} if gguf_name is None else {"gguf_file": gguf_name}
        unpack = {} if gguf_name is None else {"quantization_config": GgufConfig(dequantize=True)}
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, **gguf)
            model = AutoModelForCausalLM.from_pretrained(
                directory, local_files_only=True, dtype=dtype, **gguf, **unpack
            )
        except ImportError as error:
            raise ValueError(
                f"target.path {path}: a package is missing, pip install 'dflash-trainer[gguf]' ({_first_line(error)})"
            ) from error
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ValueError(
                f"target.path {path}: transformers cannot load it as a causal language model ({_first_line(error)})"
            ) from error
        return cls(model.to(device), tokenizer, layer_ids)  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embedding_weight.device

    @property
    def hidden_size(self) -> int:
        """Width H of one tapped layer."""
        return self.embedding_weight.shape[1]

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table, which may exceed the tokenizer's vocabulary."""
        return self.embedding_weight.shape[0]

    @property
    def max_positions(self) -> int | None:
        """Longest sequence the target was made for, in tokens; None where it does not say."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return limit if isinstance(limit, int) else None

    @property
    def embedding_weight(self) -> Tensor:
        """Embedding table [V, H], frozen."""
        return cast("nn.Embedding", self.model.get_input_embeddings()).weight

    @property
    def head_weight(self) -> Tensor:
        """Output head [V, H], frozen; the embedding table itself where the two are tied."""
        return self._head.weight

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a response: the generation settings', the model's and the tokenizer's together."""
        found: set[int] = set()
        settings = (self.model.generation_config, self.model.config, self.tokenizer)
        for ids in (getattr(source, "eos_token_id", None) for source in settings):
            found.update([ids] if isinstance(ids, int) else ids or [])
        return frozenset(found)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
    ) -> TargetOutput:
        """Run the base model without its head.

        Args:
            input_ids: Token ids.
            attention_mask: 1 at real tokens, 0 at padding; with a cache it also covers the cached positions.
            position_ids: Positions, where padding on the left shifts them.
            cache: Extended in place; from `new_cache`.
        """
        self._taps = {}
        output = self._decoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            use_cache=cache is not None,
        )
        layers = tuple(self._taps[layer_id] for layer_id in self.layer_ids)
        self._taps = None
        return TargetOutput(layers=layers, hidden=output.last_hidden_state)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """The model's own logits, in fp32, of `TargetOutput.hidden`."""
        return head_logits(hidden, self.head_weight, head_scale(self.model))

    def new_cache(self) -> DynamicCache:
        """Return an empty key-value cache for `forward`."""
        return DynamicCache(config=self.model.config)

    def resolve_mask_token_id(self, explicit: int | None = None) -> int:
        """Choose the token whose embedding stands for a position to be drafted.

        Args:
            explicit: `drafter.mask_token_id`; None takes the tokenizer's mask token, else the first embedding row that
                no token uses.

        Raises:
            ValueError: The id is outside the vocabulary, or there is no such row. Padding or end of text is never
                taken instead: both occur in real text.
        """
        if explicit is not None:
            if not 0 <= explicit < self.vocab_size:
                raise ValueError(
                    f"drafter.mask_token_id {explicit} is outside the target's vocabulary (0 to {self.vocab_size - 1})"
                )
            return explicit
        mask_token_id = self.tokenizer.mask_token_id
        if isinstance(mask_token_id, int):
            return mask_token_id
        first_unused = max(self.tokenizer.get_vocab().values()) + 1
        if first_unused < self.vocab_size:
            return first_unused
        raise ValueError(
            "drafter.mask_token_id is not set, and the target has neither a mask token nor an unused embedding row; "
            f"set it to a token that never occurs in text (0 to {self.vocab_size - 1})"
        )

    def _check_layer_ids(self) -> None:
        if not self.layer_ids or len(set(self.layer_ids)) < len(self.layer_ids):
            raise ValueError(f"target.layer_ids {list(self.layer_ids)}: name at least one layer, and each only once")
        # Not the last one: what other software calls its output has been through the final norm.
        last = self.num_layers - 2
        outside = [layer_id for layer_id in self.layer_ids if not 0 <= layer_id <= last]
        if outside:
            raise ValueError(
                f"target.layer_ids {list(self.layer_ids)}: cannot tap layer {', '.join(map(str, outside))} of a target "
                f"with {self.num_layers} layers; choose from 0 to {last}"
            )

    def _make_tap(self, layer_id: int) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor | tuple[Tensor, ...]], None]:
        def tap(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
            if self._taps is not None:
                self._taps[layer_id] = output[0] if isinstance(output, tuple) else output

        return tap


def locate(path: str | Path) -> tuple[Path, str | None]:
    """Find a model directory and, where that is what it holds, the GGUF file in it.

    Args:
        path: A Hugging Face directory, a directory with one GGUF file, a GGUF file, or `package:NAME` for the directory
            of an installed Python package, which is not imported.

    Returns:
        The directory, and the name of the GGUF file or None.

    Raises:
        ValueError: Nothing there, or no model in it.
    """
    directory = _package_directory(str(path)) if str(path).startswith(PACKAGE_PREFIX) else Path(path).expanduser()
    if directory.is_file() and directory.suffix == ".gguf":
        return directory.parent, directory.name
    if not directory.is_dir():
        raise ValueError(
            f"target.path {path}: no such directory; give one that holds a Hugging Face causal language model"
        )
    if (directory / "config.json").is_file():
        return directory, None
    gguf_names = sorted(p.name for p in directory.glob("*.gguf"))
    if len(gguf_names) == 1:
        return directory, gguf_names[0]
    if gguf_names:
        raise ValueError(f"target.path {path}: several GGUF files; name one of them: {', '.join(gguf_names)}")
    raise ValueError(f"target.path {path}: not a model directory; it holds neither config.json nor a GGUF file")


def _package_directory(path: str) -> Path:
    name = path.removeprefix(PACKAGE_PREFIX)
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"target.path {path}: Python package {name!r} is not installed; pip install it")
    return Path(spec.submodule_search_locations[0])


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
