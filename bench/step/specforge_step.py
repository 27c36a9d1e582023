"""SpecForge's drafter step: its `OnlineDFlashModel` with SDPA, given our weights and anchors."""

from collections.abc import Callable
from typing import Any

import torch
from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
from specforge.modeling.draft.dflash import DFlashDraftModel
from torch import Tensor, nn
from transformers import Qwen3Config

from bench.step.case import BLOCK_SIZE, GAMMA, NUM_ANCHORS, Case, descend, optimizer_of, serve


def qwen3_config(case: Case, **more: Any) -> Qwen3Config:  # noqa: ANN401 - fields that only one peer knows
    """The case's drafter in the terms of Hugging Face."""
    config = case.config
    return Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        layer_types=list(config.layer_types),
        tie_word_embeddings=False,
        pad_token_id=None,
        attn_implementation="sdpa",  # type: ignore[call-arg]  # every Hugging Face config takes it
        **more,
    )


def frozen_linear(weight: Tensor) -> nn.Linear:
    """A head that is never trained."""
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(weight, requires_grad=False)
    return head


def frozen_embedding(weight: Tensor) -> nn.Embedding:
    """An embedding that is never trained."""
    return nn.Embedding(weight.shape[0], weight.shape[1], _weight=weight, _freeze=True)


def make_step(case: Case) -> Callable[[], float]:
    """Return a function that makes one step and returns its loss."""
    config = qwen3_config(
        case,
        block_size=BLOCK_SIZE,
        num_target_layers=case.config.num_target_layers,
        dflash_config={
            "mask_token_id": case.config.mask_token_id,
            "target_layer_ids": list(case.config.target_layer_ids),
        },
    )
    drafter = DFlashDraftModel(config)
    drafter.load_state_dict(case.weights)
    model = OnlineDFlashModel(
        drafter,
        frozen_linear(case.head_weight),
        frozen_embedding(case.embedding_weight),
        mask_token_id=case.config.mask_token_id,
        block_size=BLOCK_SIZE,
        attention_backend="sdpa",
        num_anchors=NUM_ANCHORS,
        loss_decay_gamma=GAMMA,
    )
    model.train()
    # Drawing anchors is its own code's one random choice.
    model._sample_anchor_positions = lambda *_: (case.anchors.positions, case.anchors.keep)  # noqa: SLF001
    optimizer, loss_mask = optimizer_of(drafter), case.loss_mask.float()

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16):
            loss, _accuracy, _metrics = model(case.input_ids, case.target_hidden, loss_mask)
        return descend(loss, drafter, optimizer)

    return step


if __name__ == "__main__":
    serve(make_step)
