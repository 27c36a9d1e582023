"""What a target multiplies its embeddings and logits with, found where its architecture keeps it.

The drafter borrows the bare weights of embedding and head, so it has to do the same to what comes out of them.
"""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from trainer.tiled_head import HeadScale

# Fields that a model's logits are multiplied with.
_LOGIT_FACTORS = ("output_multiplier", "logit_scale", "lm_head_multiplier", "logits_scaling")


def embedding_scale(model: PreTrainedModel) -> float:
    """What rows of the embedding table are multiplied with before the first layer."""
    # Gemma's embedding module does it itself; Granite and Falcon do it after the module.
    own = getattr(model.get_input_embeddings(), "embed_scale", None)
    if own is not None:
        return float(own)
    return float(getattr(model.config.get_text_config(), "embedding_multiplier", 1.0))


def head_scale(model: PreTrainedModel) -> HeadScale:
    """What happens to the product of the head before it counts as logits."""
    config = model.config.get_text_config()
    multiplier = 1.0
    for name in _LOGIT_FACTORS:
        factor = float(getattr(config, name, None) or 1.0)
        # The one field that is a divisor in one family and a factor in another.
        divides = name == "logits_scaling" and str(config.model_type).startswith("granite")
        multiplier *= 1 / factor if divides else factor
    return HeadScale(multiplier, getattr(config, "final_logit_softcapping", None) or None)


def check_head(model: PreTrainedModel) -> nn.Linear:
    """The output head; raises ValueError for one that is no matrix product alone."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    if not isinstance(head, nn.Linear) or head.bias is not None:
        fault = "no linear output head" if not isinstance(head, nn.Linear) else "an output head with a bias"
        raise ValueError(
            f"target.path: {type(model).__name__} has {fault}, which no DFlash drafter can borrow; use another target"
        )
    return head
