"""Targets that scale their embeddings or logits: what is borrowed, scaled as the drafter does, is what they compute."""

import pytest
import torch
from tiny_targets import tiny_of, tiny_tokenizer
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name everyone knows it by
from transformers import PreTrainedModel

from trainer.acceptance import evaluate_drafter
from trainer.config import DrafterSettings
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
from trainer.geometry import drafter_config
from trainer.target import Target
from trainer.target_scales import check_head
from trainer.tiled_head import HeadScale, head_logits

SCALED = {
    "gemma2": {"final_logit_softcapping": 5.0},
    "gemma3_text": {"final_logit_softcapping": 5.0},
    "gemma4_text": {"final_logit_softcapping": 5.0},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0},
    "hyperclovax": {"logits_scaling": 0.25, "embedding_multiplier": 3.0},
    "falcon_h1": {"lm_head_multiplier": 0.5, "embedding_multiplier": 3.0},
}


def geometry(model: PreTrainedModel) -> DrafterConfig:
    """The drafter's configuration for a target, as training makes it."""
    return drafter_config(Target(model, tiny_tokenizer(), (1, 3)), DrafterSettings(mask_token_id=96))


@pytest.mark.filterwarnings("ignore")  # transformers warns that its fast kernels are missing on a CPU
@torch.no_grad()
@pytest.mark.parametrize("model_type", list(SCALED))
def test_borrowed_weights_give_the_targets_own_logits_and_embeddings(model_type: str) -> None:
    """With the drafter's scales, head and embedding give what goes out of and into the target's own layers."""
    model = tiny_of(model_type, **SCALED[model_type])
    config = geometry(model)
    target = Target(model, tiny_tokenizer(), (1, 3))
    ids = torch.randint(1, 97, (2, 9), generator=torch.Generator().manual_seed(1))
    entering: list[torch.Tensor] = []
    target._decoder.layers[0].register_forward_pre_hook(  # type: ignore[index, union-attr]  # a list of layers
        lambda _module, inputs, keywords: entering.append(inputs[0] if inputs else keywords["hidden_states"]),
        with_kwargs=True,
    )
    expected = model(ids, use_cache=False).logits

    hidden = target.forward(ids).hidden
    scale = HeadScale(config.output_multiplier, config.final_logit_softcapping)

    assert scale != HeadScale(1.0, None)
    torch.testing.assert_close(head_logits(hidden, target.head_weight, scale), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(target.logits(hidden), expected, rtol=1e-5, atol=1e-5)
    embedded = F.embedding(ids, target.embedding_weight) * config.input_embedding_scale
    torch.testing.assert_close(embedded, entering[0], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", ["gemma3_text", "cohere2", "granite"])
def test_scaled_targets_are_decoded_losslessly(model_type: str) -> None:
    """A drafter made for such a target drafts, and the text stays the target's own."""
    model = tiny_of(model_type, **SCALED[model_type])
    drafter = Drafter(geometry(model)).double().eval()

    assert evaluate_drafter(drafter, model.double(), [[5, 6, 7, 8]], 24).lossless


def test_head_with_a_bias_is_refused() -> None:
    """Its bias could not be exported, so such a target ends in one clear line."""
    with pytest.raises(ValueError, match=r"PhiForCausalLM has an output head with a bias.*use another target"):
        Target(tiny_of("phi"), tiny_tokenizer(), (1, 3))


def test_head_that_is_no_matrix_is_refused() -> None:
    """So is one that is more than a matrix product."""
    model = tiny_of("granite")
    model.set_output_embeddings(nn.Sequential(nn.Linear(64, 97, bias=False)))

    with pytest.raises(ValueError, match="no linear output head"):
        check_head(model)
