"""Tiny random models shared by the trainer's tests: a target, drafters of both layouts, the reference's twin."""

import math

import dflash.model
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone knows it by
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from trainer.anchors import build_blocks, sample_anchors
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig, LayerType
from trainer.loss import DrafterLoss, drafter_loss
from trainer.speculate import plain

# At this size a second thread only makes the first one wait.
torch.set_num_threads(1)

VOCAB_SIZE = 97
MASK_TOKEN_ID = 96
LAYOUTS: dict[str, tuple[LayerType, ...]] = {
    "full": ("full_attention",) * 3,
    "sliding": ("sliding_attention", "sliding_attention", "full_attention"),
}
SECOND = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 6}
"""What makes a configuration one of DFlash 2."""


def tiny_config(layout: str = "full", **changes: object) -> DrafterConfig:
    """Three layers over an eight-layer target, blocks of 4; `layout` names an entry of LAYOUTS."""
    fields: dict[str, object] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
        "block_size": 4,
        "mask_token_id": MASK_TOKEN_ID,
        "target_layer_ids": (1, 3, 5),
        "num_target_layers": 8,
        "target_hidden_size": 64,
        "layer_types": LAYOUTS[layout],
        "sliding_window": 8,
    }
    return DrafterConfig(**(fields | changes))  # type: ignore[arg-type]  # a test may pass any field


def _scaled(model: torch.nn.Module, factor: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(factor)


def tiny_drafter(config: DrafterConfig, weight_factor: float = 5.0) -> Drafter:
    """Seeded; weights are scaled up so that attention is far from uniform, and what starts at zero is drawn."""
    generator = torch.Generator().manual_seed(1)
    drafter = Drafter(config, generator)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name.endswith(("base_kernel", "kernel_projection.weight", "codebook")):
                parameter.add_(torch.empty_like(parameter).normal_(std=0.05, generator=generator))
    _scaled(drafter, weight_factor)
    return drafter.eval()


def tiny_target(**changes: object) -> Qwen3ForCausalLM:
    """A frozen eight-layer Qwen3; weights are scaled up so that its greedy text is not constant."""
    torch.manual_seed(0)
    fields: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    target = Qwen3ForCausalLM(Qwen3Config(**(fields | changes))).eval().requires_grad_(False)
    _scaled(target, 3.0)
    return target


def reference_drafter(drafter: Drafter) -> dflash.model.DFlashDraftModel:
    """The reference package's model with the same configuration and weights."""
    config = drafter.config
    slides = "sliding_attention" in config.layer_types
    reference_config = Qwen3Config(
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
        use_sliding_window=slides,
        sliding_window=config.sliding_window,
        max_window_layers=config.num_hidden_layers,
        block_size=config.block_size,
        num_target_layers=config.num_target_layers,
        dflash_config={
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "input_embedding_scale": config.input_embedding_scale,
            "output_multiplier": config.output_multiplier,
            "final_logit_softcapping": config.final_logit_softcapping,
            **{name: getattr(config, name) for name in SECOND},
        },
        **({} if config.is_causal is None else {"is_causal": config.is_causal}),
    )
    kind = dflash.model.DFlashDraftModel if config.selector_rank is None else dflash.model.DFlash2DraftModel
    model = kind(reference_config).eval()
    # Its codebooks are embedding modules; published files, and we, name the bare tensors.
    named = {f"{name}.weight" if name.endswith("codebook") else name: t for name, t in drafter.state_dict().items()}
    model.load_state_dict(named, strict=True)
    return model


@torch.no_grad()
def tapped(target: PreTrainedModel, input_ids: Tensor, config: DrafterConfig) -> Tensor:
    """What a trainer taps from the target: [B, S, L*H]."""
    states = target(input_ids, output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[i + 1] for i in config.target_layer_ids], dim=-1)


def random_prompts(count: int, seed: int, length: int = 11) -> list[list[int]]:
    """Prompts of random tokens."""
    tokens: list[list[int]] = torch.randint(
        0, 90, (count, length), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return tokens


def overfit(
    target: PreTrainedModel, prompts: list[list[int]], config: DrafterConfig, num_steps: int
) -> tuple[Drafter, DrafterLoss]:
    """Train a fresh drafter on the target's own 60-token answers; return it and the last step's loss."""
    texts = torch.tensor([prompt + plain(target, prompt, 60).output_ids for prompt in prompts])
    loss_mask = torch.ones_like(texts)
    loss_mask[:, : len(prompts[0])] = 0
    target_hidden = tapped(target, texts, config).float()
    embedding, head = target.get_input_embeddings().weight.float(), target.get_output_embeddings().weight.float()
    drafter = Drafter(config, torch.Generator().manual_seed(5))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 16, 0.5 * (1 + math.cos(math.pi * step / num_steps)))
    )
    generator = torch.Generator().manual_seed(6)
    for _ in range(num_steps):
        blocks = build_blocks(texts, loss_mask, sample_anchors(loss_mask, 16, generator), config, decay_gamma=4.0)
        noise_embedding = F.embedding(blocks.noise_ids, embedding)
        hidden = drafter(noise_embedding, target_hidden, blocks.position_ids, blocks.masks)
        loss = drafter_loss(hidden, head, blocks.labels, blocks.weights, config)
        optimizer.zero_grad()
        (loss.numerator / loss.denominator).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return drafter.eval(), loss
