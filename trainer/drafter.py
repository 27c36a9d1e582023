"""The DFlash drafter: a small transformer that fills one block of masked slots in a single pass.

It owns no embedding and no output head; both are borrowed, frozen, from the target, so its width is the target's.
Every layer attends over [context | block]: context keys and values are projections of the target's own hidden states
(tapped at a few layers, mixed once by `fc`), block keys and values are projections of the slots. The same projection
weights serve both sides.

Parameters stay fp32 and `torch.autocast` lowers the matrix products; norms and rotary angles are always fp32, and the
inverse frequencies are computed in each forward, because a buffer would be rounded by `.to(torch.bfloat16)`.

DFlash 2 adds a short convolution around each part of a layer and a selector of candidates; see their own modules.

Shapes: B samples, S context positions, Q block positions, H hidden size, A attention heads, G key/value heads,
D head dimension, L tapped layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everyone knows it by

from trainer.attention import KeysValues, View, attend
from trainer.candidate_selector import CandidateSelector
from trainer.drafter_config import DrafterConfig
from trainer.dynamic_convolution import DynamicConvolution, around


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
        self.attention_conv, self.mlp_conv = _convolution(config), _convolution(config)

    def forward(self, x: Tensor, context: KeysValues, rotary: Rotary, view: View) -> Tensor:
        """Map block states `x` [B, Q, H] to the next layer's."""

        def attended(block: Tensor) -> Tensor:
            out: Tensor = self.self_attn(block, context, rotary, view)
            return out

        x = x + around(self.attention_conv, attended, self.input_layernorm(x))
        return x + around(self.mlp_conv, self.mlp, self.post_attention_layernorm(x))


def _convolution(config: DrafterConfig) -> DynamicConvolution | None:
    if config.conv_kernel_size is None or config.conv_group_size is None:
        return None
    return DynamicConvolution(config.hidden_size, config.conv_kernel_size, config.conv_group_size, config.block_size)


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
        self.candidate_selector: CandidateSelector | None = None
        if config.selector_rank is not None and config.selector_top_k is not None:
            sizes = (config.hidden_size, config.vocab_size, config.selector_rank, config.selector_top_k)
            self.candidate_selector = CandidateSelector(*sizes)
        self._reset(generator)

    def _reset(self, generator: torch.Generator | None) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.config.initializer_range, generator=generator)
        for module in self.modules():
            if isinstance(module, DynamicConvolution):
                module.reset()
            elif isinstance(module, CandidateSelector):
                module.reset(self.config.initializer_range, generator)

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
