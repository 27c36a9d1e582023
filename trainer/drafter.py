"""The DFlash drafter: a small transformer that fills one block of masked slots in a single pass.

It owns no embedding and no output head; both are borrowed, frozen, from the target, so its width is the target's.
Every layer attends over [context | block]: context keys and values are projections of the target's own hidden states
(tapped at a few layers, mixed once by `fc`), block keys and values are projections of the slots. The same projection
weights serve both sides.

Parameters stay fp32 and `torch.autocast` lowers the matrix products; norms and rotary angles are always fp32, and the
inverse frequencies are computed in each forward, because a buffer would be rounded by `.to(torch.bfloat16)`.

Shapes: B samples, S context positions, Q block positions, H hidden size, A attention heads, G key/value heads,
D head dimension, L tapped layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everyone knows it by

from trainer.attention import KeysValues, View, attend

LayerType = Literal["full_attention", "sliding_attention"]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]


class DrafterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Describe one drafter completely; names follow the published checkpoints.

    `target_layer_ids` are 0-based decoder layers whose output is tapped. `is_causal` overrides the visibility inside a
    block for all layers; unset, sliding layers are causal and full layers see the whole block.
    Raises ValueError (msgspec.ValidationError when decoded) when fields contradict each other.
    """

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    target_hidden_size: int
    layer_types: tuple[LayerType, ...]
    sliding_window: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    initializer_range: float = 0.02
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    is_causal: bool | None = None

    def __post_init__(self) -> None:
        """Reject contradictions with one message that names every field at fault."""
        faults = [message for holds, message in self._rules() if not holds]
        if faults:
            raise ValueError("drafter config: " + "; ".join(faults))

    def _rules(self) -> list[tuple[bool, str]]:
        ids, last_tap = list(self.target_layer_ids), self.num_target_layers - 2
        heads, key_value_heads = self.num_attention_heads, self.num_key_value_heads
        layers, last_row = self.num_hidden_layers, self.vocab_size - 1
        mask_id, cap, window = self.mask_token_id, self.final_logit_softcapping, self.sliding_window
        slides = "sliding_attention" in self.layer_types
        # Not the last layer: what a Hugging Face model reports for it has been through the final norm.
        taps_fit = bool(ids) and ids == sorted(set(ids)) and ids[0] >= 0 and ids[-1] <= last_tap
        widths = f"hidden_size={self.hidden_size} must equal target_hidden_size={self.target_hidden_size}"
        return [
            (self.hidden_size == self.target_hidden_size, f"{widths}: embedding and head are the target's"),
            (len(self.layer_types) == layers, f"layer_types must have num_hidden_layers={layers} entries"),
            (heads % key_value_heads == 0, f"{heads} attention heads cannot share {key_value_heads} key/value heads"),
            (self.head_dim % 2 == 0, f"head_dim={self.head_dim} must be even for rotary embeddings"),
            (self.block_size > 1, f"block_size={self.block_size} must be at least 2, a known token and a drafted one"),
            (0 <= mask_id <= last_row, f"mask_token_id={mask_id} must be a row of the embedding, 0 to {last_row}"),
            (taps_fit, f"target_layer_ids={ids} must ascend within 0 to {last_tap}"),
            (not slides or (window or 0) > 0, f"sliding_window={window} must be positive for sliding_attention layers"),
            (cap is None or cap > 0, f"final_logit_softcapping={cap} must be positive, or left out for no cap"),
        ]


def build_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Spread `num_taps` layer ids evenly from the second to the third-last target layer; one tap takes the middle.

    Raises ValueError when the target has too few layers to give distinct ids.
    """
    if num_taps == 1:
        ids = [num_target_layers // 2]
    else:
        span = num_target_layers - 4
        ids = [round(1 + i * span / (num_taps - 1)) for i in range(num_taps)]
    if ids != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] <= num_target_layers - 2:
        raise ValueError(
            f"a target of {num_target_layers} layers cannot be tapped at {num_taps} evenly spread layers; "
            "ask for fewer taps or name target_layer_ids"
        )
    return tuple(ids)


class RMSNorm(nn.Module):
    """Scale by the root mean square over the last dimension, in fp32, returning the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` [..., size]."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines [B, 1, positions, D] in fp32 for one set of positions."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, position_ids: Tensor, head_dim: int, theta: float) -> "Rotary":
        """Compute the angles of `position_ids` [B, positions]."""
        steps = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32)
        inv_freq = 1.0 / theta ** (steps / head_dim)
        angles = position_ids[:, None, :, None].float() * inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        return cls(cos=angles.cos(), sin=angles.sin())

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate `x` [B, heads, positions, D], pairing dimension i with i + D/2."""
        first, second = x.float().chunk(2, dim=-1)
        return (x * self.cos + torch.cat([-second, first], dim=-1) * self.sin).to(x.dtype)


@dataclass
class ContextCache:
    """Hold each layer's context keys and values [B, G, length, D] while one text is drafted.

    Only context is kept, never block positions, so nothing is ever rolled back. One text, one thread.
    """

    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of context positions held."""
        return self.layers[0][0].shape[2] if self.layers else 0

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append to one layer and return all its keys and values."""
        if layer == len(self.layers):
            self.layers.append((keys, values))
        else:
            old_keys, old_values = self.layers[layer]
            self.layers[layer] = (torch.cat([old_keys, keys], dim=2), torch.cat([old_values, values], dim=2))
        return self.layers[layer]


class Attention(nn.Module):
    """Attend from block positions over context and block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def keys_values(self, x: Tensor, rotary: Rotary) -> KeysValues:
        """Project `x` [B, n, H] to rotated keys and to values, both [B, G, n, D]."""
        keys = self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2)
        return rotary.rotate(keys), self._heads(self.v_proj(x)).transpose(1, 2)

    def forward(self, block: Tensor, context: KeysValues, rotary: Rotary, view: View) -> Tensor:
        """Attend from `block` [B, Q, H] over `context` keys and values and itself, as far as `view` allows."""
        queries = rotary.rotate(self.q_norm(self._heads(self.q_proj(block))).transpose(1, 2))
        mixed = attend(queries, context, self.keys_values(block, rotary), view)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [..., H] to [..., H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DrafterLayer(nn.Module):
    """One pre-norm layer; the context enters its attention without the layer's input norm."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, context: KeysValues, rotary: Rotary, view: View) -> Tensor:
        """Map block states `x` [B, Q, H] to the next layer's."""
        x = x + self.self_attn(self.input_layernorm(x), context, rotary, view)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Drafter(nn.Module):
    """The trainable network; the names in its state dict are those of published DFlash checkpoints.

    Weights start as N(0, initializer_range) drawn from `generator` (torch's global one when None), norms as ones.
    """

    def __init__(self, config: DrafterConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList([DrafterLayer(config) for _ in range(config.num_hidden_layers)])
        num_taps = len(config.target_layer_ids)
        self.fc = nn.Linear(num_taps * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range, generator=generator)

    def forward(
        self,
        noise_embedding: Tensor,
        target_hidden: Tensor,
        position_ids: Tensor,
        masks: Mapping[str, View],
        cache: ContextCache | None = None,
    ) -> Tensor:
        """Compute the block states whose logits predict the token at each slot's own position.

        Args:
            noise_embedding: [B, Q, H] target embedding rows of [anchor, MASK, MASK, ...], already scaled.
            target_hidden: [B, S, L*H] outputs of the tapped target layers, new context only when `cache` is given.
            position_ids: [B, S+Q] positions of the new context followed by those of the block.
            masks: what is visible in each layer type in use; beside a cache [B or 1, 1, Q, cached+S+Q] booleans.
            cache: context of earlier calls; extended in place by this call's context.

        Returns:
            [B, Q, H] after the final norm.
        """
        context = self.hidden_norm(self.fc(target_hidden))
        num_context, head_dim, theta = target_hidden.shape[1], self.config.head_dim, self.config.rope_theta
        context_rotary = Rotary.at(position_ids[:, :num_context], head_dim, theta)
        block_rotary = Rotary.at(position_ids[:, num_context:], head_dim, theta)
        x = noise_embedding
        for i, (layer_type, layer) in enumerate(zip(self.config.layer_types, self.layers, strict=True)):
            assert isinstance(layer, DrafterLayer)
            keys_values = layer.self_attn.keys_values(context, context_rotary)
            if cache is not None:
                keys_values = cache.extend(i, *keys_values)
            x = layer(x, keys_values, block_rotary, masks[layer_type])
        out: Tensor = self.norm(x)
        return out
