"""What a drafter is before its weights: sizes, taps and layout, and whether they fit together."""

from typing import Annotated, Literal

import msgspec

LayerType = Literal["full_attention", "sliding_attention"]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]


class DrafterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Describe one drafter completely; names follow the published checkpoints.

    `target_layer_ids` are 0-based decoder layers whose output is tapped. `is_causal` overrides the visibility inside a
    block for all layers; unset, sliding layers are causal and full layers see the whole block. The four fields
    from `conv_kernel_size` on make it a DFlash 2 drafter; they are set together or not at all.
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
    conv_kernel_size: PositiveInt | None = None
    conv_group_size: PositiveInt | None = None
    selector_rank: PositiveInt | None = None
    selector_top_k: PositiveInt | None = None

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
        second = [self.conv_kernel_size, self.conv_group_size, self.selector_rank, self.selector_top_k]
        group, candidates = self.conv_group_size or 1, self.selector_top_k or 1
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
            (
                len({n is None for n in second}) == 1,
                "set conv_kernel_size to selector_top_k together or not at all",
            ),
            (self.hidden_size % group == 0, f"conv_group_size={group} must divide hidden_size={self.hidden_size}"),
            (
                candidates <= self.vocab_size,
                f"selector_top_k={candidates} must be at most vocab_size={self.vocab_size}",
            ),
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
