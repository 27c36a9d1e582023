"""One text in the target and one in the drafter: their caches, fed a few tokens at a time.

The target is any Hugging Face causal LM; what tapped layer i put out is its `hidden_states[i + 1]`. A session is one
text, batch 1, one thread. Everything here runs in inference mode.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everyone knows it by
from transformers import DynamicCache, PreTrainedModel

from trainer.anchors import block_masks
from trainer.drafter import ContextCache, Drafter
from trainer.sampling import Proposal, Sampler
from trainer.tiled_head import HeadScale, head_logits


class TargetSession:
    """One text in the target: one pass at a time over new tokens, and a way to take back their tail.

    A cache of keys and values is cut. Recurrent state cannot be cut, so before a revocable pass the layers that hold
    such state are copied (it does not grow with the text), put back, and replayed up to the cut: exact, at the
    price of the copy and of a second, shorter pass.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        self._cache.activate_past_recording()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self._before: dict[int, Any] = {}  # by number of the layer
        self._tokens: Tensor | None = None
        self._num_kept = 0

    def forward(self, token_ids: list[int], *, revocable: bool, layer_ids: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Run new tokens; return logits [n, V] (only of the last token unless revocable) and tapped states."""
        self._tokens = torch.tensor([token_ids], device=self._model.device)
        layers = self._cache.layers if revocable else []
        self._before = {i: copy.deepcopy(layer) for i, layer in enumerate(layers) if not layer.is_croppable}
        out = self._run(self._tokens, states=bool(layer_ids), num_logits=0 if revocable else 1)
        states = [out.hidden_states[i + 1] for i in layer_ids]
        return out.logits[0], torch.cat(states, dim=-1) if states else out.logits[:, :, :0]

    def keep(self, num_tokens: int) -> None:
        """Forget all but the first `num_tokens` tokens of the last pass; required after each pass."""
        assert self._tokens is not None
        surplus = self._tokens.shape[1] - num_tokens
        if surplus and self._before:
            # The whole pass is taken back, everywhere alike, and its beginning is run again.
            whole = self._tokens.shape[1]
            for i, layer in enumerate(self._cache.layers):
                if i in self._before:
                    self._cache.layers[i] = self._before[i]
                else:
                    layer.crop(-whole)  # type: ignore[union-attr]  # croppable, or it would be in `_before`
            self._run(self._tokens[:, :num_tokens], states=False, num_logits=1)
            surplus = 0
        self._cache.crop(-surplus)
        self._num_kept += num_tokens

    # Without a return type: every architecture has its own.
    def _run(self, tokens: Tensor, *, states: bool, num_logits: int):  # type: ignore[no-untyped-def]  # noqa: ANN202
        # Positions are given, as some multimodal models would otherwise go on from those of the text before.
        positions = torch.arange(self._num_kept, self._num_kept + tokens.shape[1], device=tokens.device)
        return self._model(
            tokens,
            position_ids=positions[None],
            cache=self._cache,
            use_cache=True,
            output_hidden_states=states,
            logits_to_keep=num_logits,
        )


class DraftSession:
    """One text in the drafter: its context cache and the borrowed embedding and head."""

    def __init__(self, drafter: Drafter, target: PreTrainedModel, sampler: Sampler) -> None:
        self._drafter = drafter
        self._sampler = sampler
        self._embedding = _weight(target.get_input_embeddings())
        self._head = _weight(target.get_output_embeddings())  # type: ignore[no-untyped-call]  # the same
        self._cache = ContextCache()

    def draft(self, anchor: int, num_drafted: int, new_states: Tensor) -> Proposal:
        """Propose `num_drafted` tokens after `anchor`, given the target's states [1, n, L*H] since the last call."""
        config, device = self._drafter.config, new_states.device
        dtype = self._drafter.fc.weight.dtype
        start = self._cache.length + new_states.shape[1]
        noise_ids = torch.full((1, 1 + num_drafted), config.mask_token_id, device=device)
        noise_ids[0, 0] = anchor
        masks = block_masks(
            torch.tensor([[start]], device=device), torch.ones(1, 1, dtype=torch.bool, device=device), start, config
        )
        # A block cut short at the length limit is the head of a whole one.
        shown = start + 1 + num_drafted
        hidden = self._drafter(
            noise_embedding=F.embedding(noise_ids, self._embedding).to(dtype) * config.input_embedding_scale,
            target_hidden=new_states.to(dtype),
            position_ids=torch.arange(self._cache.length, shown, device=device)[None],
            masks={name: mask[:, :, : 1 + num_drafted, :shown] for name, mask in masks.items()},
            cache=self._cache,
        )[0, 1:]
        scale = HeadScale(config.output_multiplier, config.final_logit_softcapping)
        return self._propose(hidden, head_logits(hidden, self._head, scale), anchor)

    def _propose(self, hidden: Tensor, logits: Tensor, anchor: int) -> Proposal:
        sampler, selector = self._sampler, self._drafter.candidate_selector
        if selector is None or not len(hidden):
            return sampler.propose(logits)
        # The few candidates are the limit here, so of the sampler's settings only the temperature applies to them.
        plain = sampler.only_temperature()
        tokens, scores = selector.path(hidden, logits, anchor, plain.choose)
        return Proposal(tokens=tokens.tolist(), probabilities=None if plain.greedy else plain.probabilities(scores))


def _weight(module: nn.Module | None) -> Tensor:
    weight = getattr(module, "weight", None)
    assert isinstance(weight, Tensor), "a Hugging Face causal LM has an embedding and an output head"
    return weight
