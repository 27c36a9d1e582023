"""The step of speculators: its DFlash model with SDPA and hard labels, on the batch packed into one sequence.

It learns what the target's logits prefer, so it also runs the target's head over its anchored positions.
"""

from collections.abc import Callable

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig, core
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor

from bench.step.case import (
    BLOCK_SIZE,
    GAMMA,
    NUM_ANCHORS,
    NUM_SEQUENCES,
    NUM_TOKENS,
    Case,
    descend,
    optimizer_of,
    serve,
)
from bench.step.specforge_step import frozen_embedding, frozen_linear, qwen3_config


def make_model(case: Case) -> DFlashDraftModel:
    """Its model with the case's weights."""
    config = DFlashSpeculatorConfig(
        transformer_layer_config=qwen3_config(case),
        draft_vocab_size=case.config.vocab_size,
        block_size=BLOCK_SIZE,
        aux_hidden_state_layer_ids=list(case.config.target_layer_ids),
        mask_token_id=case.config.mask_token_id,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK_SIZE - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
        ),
    )
    model = DFlashDraftModel(config)
    model.embed_tokens = frozen_embedding(case.embedding_weight)
    model.lm_head = model.verifier_lm_head = frozen_linear(case.head_weight)
    model.load_state_dict(case.weights, strict=False)
    return model.train()


def packed(batch: Tensor) -> Tensor:
    """All sequences [B, S, ...] one after the other: [1, B*S, ...]."""
    return batch.flatten(0, 1)[None]


def make_step(case: Case) -> Callable[[], float]:
    """Return a function that makes one step and returns its loss."""
    model = make_model(case)
    starts = torch.arange(NUM_SEQUENCES)[:, None] * NUM_TOKENS
    anchors, keep = (case.anchors.positions + starts).flatten(), case.anchors.keep.flatten()
    # Drawing anchors is its own code's one random choice; it looks up the function at each step.
    core.select_anchors = lambda *_: (anchors, keep)
    document_ids = torch.arange(NUM_SEQUENCES).repeat_interleave(NUM_TOKENS)[None]
    position_ids = torch.arange(NUM_TOKENS).repeat(NUM_SEQUENCES)[None]
    hidden, last_hidden = packed(case.target_hidden), packed(case.last_hidden)
    input_ids, loss_mask = packed(case.input_ids), packed(case.loss_mask)
    optimizer, loss_config = optimizer_of(model), resolve_loss_config("ce", "eager")

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16):
            _, loss, _metrics = model(
                hidden,
                input_ids,
                loss_mask,
                last_hidden,
                document_ids,
                position_ids,
                loss_config=loss_config,
                gamma=GAMMA,
                max_anchors=NUM_SEQUENCES * NUM_ANCHORS,
            )
        return descend(loss, model, optimizer)

    return step


if __name__ == "__main__":
    serve(make_step)
