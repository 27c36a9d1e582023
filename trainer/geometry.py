"""The drafter's geometry, from the target's and the few sizes a user may set."""

from trainer.config import DrafterSettings, TargetConfig
from trainer.drafter_config import DrafterConfig, LayerType, build_target_layer_ids
from trainer.target import Target
from trainer.target_scales import embedding_scale, head_scale

FULL_ATTENTION: LayerType = "full_attention"
INTERMEDIATE_RATIO = 3
"""Feed-forward width over hidden width when drafter.intermediate_size is 0, as in the published drafters."""
DEFAULT_RMS_NORM_EPS = 1e-6


def layer_ids(settings: TargetConfig, num_target_layers: int) -> tuple[int, ...]:
    """The layers to tap: those named, else `num_taps` spread over the target; raises ValueError."""
    if settings.layer_ids:
        return settings.layer_ids
    try:
        return build_target_layer_ids(num_target_layers, settings.num_taps)
    except ValueError as error:
        raise ValueError(f"target.num_taps={settings.num_taps}: {error}") from error


def drafter_config(target: Target, settings: DrafterSettings) -> DrafterConfig:
    """Everything the drafter needs to know; raises ValueError naming what does not fit."""
    config = target.model.config.get_text_config()
    # Where layers differ in these the attributes refuse to answer, and the plain values are those of most layers.
    values = config.to_dict()
    num_heads, num_key_value_heads = values["num_attention_heads"], values.get("num_key_value_heads")
    head_dim = values.get("head_dim") or target.hidden_size // num_heads
    num_layers, scale = settings.num_layers, head_scale(target.model)
    return DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=settings.intermediate_size or INTERMEDIATE_RATIO * target.hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=settings.num_attention_heads or num_heads,
        num_key_value_heads=settings.num_key_value_heads or num_key_value_heads or num_heads,
        head_dim=settings.head_dim or head_dim,
        vocab_size=target.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        block_size=settings.block_size,
        mask_token_id=target.resolve_mask_token_id(settings.mask_token_id),
        target_layer_ids=target.layer_ids,
        num_target_layers=target.num_layers,
        target_hidden_size=target.hidden_size,
        layer_types=settings.layer_types or (FULL_ATTENTION,) * num_layers,
        sliding_window=settings.sliding_window,
        # Targets with another kind of norm have no such field.
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or DEFAULT_RMS_NORM_EPS,
        rope_theta=_rope_theta(values),
        input_embedding_scale=embedding_scale(target.model),
        output_multiplier=scale.multiplier,
        final_logit_softcapping=scale.softcap,
        conv_kernel_size=settings.conv_kernel_size,
        conv_group_size=settings.conv_group_size,
        selector_rank=settings.selector_rank,
        selector_top_k=settings.selector_top_k,
    )


def _rope_theta(config: dict[str, object]) -> float:
    """RoPE base of the target, whichever of its two spellings the configuration uses."""
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict):
        # Some targets have one base for each kind of attention; ours is for whole texts.
        parameters = parameters.get(FULL_ATTENTION, parameters)
    value = parameters.get("rope_theta") if isinstance(parameters, dict) else config.get("rope_theta")
    return float(value) if isinstance(value, int | float) else 10_000.0
