"""The presets of published drafters give exactly the published geometry."""

import json

import dflash.model
import pytest
import torch
from tiny_targets import tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3Config

from trainer.app import main
from trainer.config import TrainerConfig, load_config
from trainer.drafter import Drafter
from trainer.export import drafter_config_json
from trainer.geometry import drafter_config
from trainer.target import Target

# Config of the targets, as far as the drafter depends on it.
QWEN3 = {"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 36}
QWEN3 |= {"vocab_size": 151936, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
QWEN35 = {"head_dim": 256, "num_attention_heads": 24, "num_key_value_heads": 4, "num_hidden_layers": 64}
QWEN35 |= {"vocab_size": 248320, "max_position_embeddings": 262144, "hidden_size": 5120, "intermediate_size": 17408}
TARGETS = {
    "qwen3-4b": AutoConfig.for_model("qwen3", **QWEN3, hidden_size=2560, intermediate_size=9728),
    "qwen3-8b": AutoConfig.for_model("qwen3", **QWEN3, hidden_size=4096, intermediate_size=12288),
    "qwen3.6-27b": AutoConfig.for_model(
        "qwen3_5",
        text_config=QWEN35 | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}},
        vision_config={"depth": 1, "out_hidden_size": 5120},
    ),
}
# What the configurations of the published drafters say.
PUBLISHED = {
    "qwen3-4b": {"hidden_size": 2560, "intermediate_size": 9728, "vocab_size": 151936, "rope_theta": 1e6},
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151936, "rope_theta": 1e6},
    "qwen3.6-27b": {
        "hidden_size": 5120, "intermediate_size": 17408, "vocab_size": 248320, "rope_theta": 1e7,
        "num_target_layers": 64, "sliding_window": 2048, "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "initializer_range": 0.02, "attention_bias": False,
        "tie_word_embeddings": False, "rope_scaling": None, "max_window_layers": 5, "dtype": "bfloat16",
        "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    },
}  # fmt: skip
ALL = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 5, "block_size": 16}
SMALLER = {"num_target_layers": 36, "layer_types": ["full_attention"] * 5, "use_sliding_window": False}
SMALLER |= {"dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}}


def settings(preset: str) -> TrainerConfig:
    """The settings that a preset gives."""
    return load_config(preset=preset, assignments=[], environ={})


def on_meta(preset: str) -> Drafter:
    """The drafter that a preset trains against its true target, without memory for the weights of either."""
    config, model_config = settings(preset), TARGETS[preset]
    model_class = AutoModelForImageTextToText if hasattr(model_config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        target = Target(model_class.from_config(model_config), tiny_tokenizer(), config.target.layer_ids)
        return Drafter(drafter_config(target, config.drafter))


@pytest.mark.parametrize("preset", list(TARGETS))
def test_published_geometry(preset: str) -> None:
    """Every published field comes out, and the reference built from them has the same tensors."""
    drafter = on_meta(preset)
    written = json.loads(json.dumps(drafter_config_json(drafter.config, torch.bfloat16)))
    published = ALL | (PUBLISHED[preset] if "dflash_config" in PUBLISHED[preset] else SMALLER | PUBLISHED[preset])

    assert {name: written[name] for name in published} == published
    with torch.device("meta"):
        reference = dflash.model.DFlashDraftModel(Qwen3Config(**written))
    expected = {name: tensor.shape for name, tensor in reference.state_dict().items()}
    assert {name: tensor.shape for name, tensor in drafter.state_dict().items()} == expected


def test_number_of_parameters() -> None:
    """The drafter of the 27B target has 1.73 billion: 320 million a layer, and 131 million that join the taps."""
    drafter = on_meta("qwen3.6-27b")

    assert sum(p.numel() for p in drafter.parameters()) == pytest.approx(1.73e9, rel=0.001)
    assert sum(p.numel() for p in drafter.layers[0].parameters()) == pytest.approx(320e6, rel=0.001)
    assert drafter.fc.weight.shape == (5120, 25600)


@pytest.mark.parametrize("preset", list(TARGETS))
def test_eight_gpus(preset: str) -> None:
    """Five GPUs run the target and three train; the queue holds more than one batch for each of them."""
    config = settings(preset)
    batch_bytes = config.train.batch_size * config.data.max_length * on_meta(preset).fc.in_features * 2

    assert config.devices.targets == (0, 1, 2, 3, 4)
    assert config.devices.drafters == (5, 6, 7)
    assert config.queue.max_bytes >= 8 * batch_bytes


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """`dflash-train presets` names each of them with what it is for."""
    assert main(["presets"]) == 0

    lines = capsys.readouterr().out.splitlines()
    for preset in TARGETS:
        assert any(line.startswith(f"{preset} ") and "on 8 GPUs" in line for line in lines)
