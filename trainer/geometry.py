"""The drafter's geometry, from the target's and the few sizes a user may set."""

from trainer.config import DrafterSettings, TargetConfig
from trainer.drafter_config import DrafterConfig, LayerType, build_target_layer_ids
from trainer.target import Target

FULL_ATTENTION: LayerType = "full_attention"
INTERMEDIATE_RATIO = 3
"""Feed-forward width over hidden width when drafter.intermediate_size is 0, as in the published drafters."""


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
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_layers = settings.num_layers
    return DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=settings.intermediate_size or INTERMEDIATE_RATIO * target.hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=settings.num_attention_heads or config.num_attention_heads,
        num_key_value_heads=settings.num_key_value_heads or config.num_key_value_heads,
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
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=_rope_theta(config.to_dict()),
        final_logit_softcapping=getattr(config, "final_logit_softcapping", None),
    )


def _rope_theta(config: dict[str, object]) -> float:
    """RoPE base of the target, whichever of its two spellings the configuration uses."""
    parameters = config.get("rope_parameters")
    value = parameters.get("rope_theta") if isinstance(parameters, dict) else config.get("rope_theta")
    return float(value) if isinstance(value, int | float) else 10_000.0
