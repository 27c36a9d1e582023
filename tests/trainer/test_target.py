"""The frozen target: what its taps read, what it lends, and what it refuses."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tiny_targets import random_ids, tiny_model, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trainer.target import Target, TargetOutput, locate


def make_target(layer_ids: tuple[int, ...] = (0, 2), *, tied: bool = True, mask_token: str | None = None) -> Target:
    """Return a tiny target."""
    return Target(tiny_model(tied=tied), tiny_tokenizer(mask_token=mask_token), layer_ids)


def features(output: TargetOutput) -> torch.Tensor:
    """Put the tapped layers side by side, as they are packed."""
    return torch.cat(output.layers, dim=-1)


def save(directory: Path) -> Path:
    """Write a tiny model and its tokenizer as a Hugging Face directory."""
    tiny_model().save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def random_hybrid() -> PreTrainedModel:
    """Return a random Qwen3.5 with linear-attention and full-attention layers."""
    config = AutoConfig.for_model(
        "qwen3_5_text",
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        eos_token_id=0,
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    assert isinstance(model, PreTrainedModel)
    return model.eval()


class TestTaps:
    """What the hooks read."""

    def test_feature_is_the_next_hidden_state(self) -> None:
        """Layer id i reads what transformers calls hidden_states[i + 1], side by side in the order asked for."""
        target = make_target((2, 0))
        input_ids = random_ids(2, 9)
        states = target.model(input_ids, output_hidden_states=True).hidden_states

        assert torch.equal(features(target.forward(input_ids)), torch.cat([states[3], states[1]], dim=-1))

    def test_right_padding_changes_nothing(self) -> None:
        """A sequence has the same features alone and padded on the right beside a longer one."""
        target = make_target()
        long_ids, short_ids = random_ids(1, 12), random_ids(1, 7, seed=1)
        padded = torch.cat([long_ids, torch.nn.functional.pad(short_ids, (0, 5))])
        mask = torch.arange(12) < torch.tensor([[12], [7]])
        both = features(target.forward(padded, attention_mask=mask))

        torch.testing.assert_close(both[1, :7], features(target.forward(short_ids))[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(both[0], features(target.forward(long_ids))[0], atol=1e-5, rtol=1e-5)

    @pytest.mark.filterwarnings("ignore")  # transformers warns that its fast kernels are missing on a CPU
    def test_hybrid_target_taps_both_kinds_of_layer(self) -> None:
        """Linear-attention and full-attention layers are read alike, and padding does not leak through either."""
        target = Target(random_hybrid(), tiny_tokenizer(), (0, 1, 2))
        input_ids = random_ids(1, 7)
        states = target.model(input_ids, output_hidden_states=True).hidden_states
        mask = (torch.arange(10) < 7)[None]
        padded = features(target.forward(torch.nn.functional.pad(input_ids, (0, 3)), attention_mask=mask))

        assert torch.equal(features(target.forward(input_ids)), torch.cat(states[1:4], dim=-1))
        torch.testing.assert_close(padded[:, :7], features(target.forward(input_ids)), atol=1e-5, rtol=1e-5)

    def test_cached_passes_give_the_same_as_one(self) -> None:
        """Feeding a sequence in two parts with a cache gives the features and logits of one pass."""
        target = make_target()
        input_ids = random_ids(1, 10)
        whole = target.forward(input_ids)
        cache = target.new_cache()
        parts = [target.forward(part, cache=cache) for part in (input_ids[:, :6], input_ids[:, 6:])]

        torch.testing.assert_close(torch.cat([features(p) for p in parts], 1), features(whole), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            torch.cat([target.logits(p.hidden) for p in parts], 1), target.model(input_ids).logits, atol=1e-4, rtol=1e-4
        )

    def test_passes_of_others_leave_nothing_behind(self) -> None:
        """Running the model directly, as an evaluation does, keeps no activations alive in the target."""
        target = make_target()
        target.model(random_ids(1, 5))

        assert target._taps is None

    def test_target_is_frozen(self) -> None:
        """No parameter asks for a gradient and no feature carries one."""
        target = make_target()

        assert not any(parameter.requires_grad for parameter in target.model.parameters())
        assert not features(target.forward(random_ids(1, 5))).requires_grad


class TestLent:
    """What the drafter borrows."""

    @pytest.mark.parametrize("tied", [True, False])
    def test_embedding_and_head(self, *, tied: bool) -> None:
        """Both tables are the model's own tensors, one and the same where they are tied."""
        target = make_target(tied=tied)
        states = target.model(torch.tensor([[1, 2]]), output_hidden_states=True)

        assert (target.embedding_weight is target.head_weight) == tied
        assert (target.num_layers, target.hidden_size, target.vocab_size, target.max_positions) == (4, 32, 320, 256)
        torch.testing.assert_close(states.hidden_states[-1] @ target.head_weight.T, states.logits)

    def test_eos_comes_from_all_places(self) -> None:
        """The generation settings, the model's configuration and the tokenizer may each name ends of a response."""
        model, tokenizer = tiny_model(), tiny_tokenizer()
        model.generation_config.eos_token_id = [7, 8]

        assert Target(model, tokenizer, (0,)).eos_token_ids == {0, 7, 8}

    def test_mask_token_is_chosen_in_order(self) -> None:
        """An explicit id comes first, then the tokenizer's mask token, then the first row that no token uses."""
        named = make_target(mask_token="<turn>")
        unnamed = make_target()

        assert named.resolve_mask_token_id(9) == 9
        assert named.resolve_mask_token_id() == named.tokenizer.convert_tokens_to_ids("<turn>")
        assert unnamed.resolve_mask_token_id() == len(unnamed.tokenizer)

    def test_mask_token_outside_the_vocabulary_is_an_error(self) -> None:
        """An id without an embedding row is refused with the range."""
        with pytest.raises(ValueError, match=r"drafter\.mask_token_id 320 is outside .*\(0 to 319\)"):
            make_target().resolve_mask_token_id(320)

    def test_mask_token_is_never_padding(self) -> None:
        """Where neither a mask token nor an unused row exists, the user must choose; eos is not taken instead."""
        tokenizer = tiny_tokenizer()
        target = Target(tiny_model(vocab_size=len(tokenizer)), tokenizer, (0,))

        with pytest.raises(ValueError, match=r"drafter\.mask_token_id is not set, .* never occurs in text"):
            target.resolve_mask_token_id()


class TestLoad:
    """From a directory."""

    def test_directory(self, tmp_path: Path) -> None:
        """A Hugging Face directory loads in the dtype asked for, with tokenizer and taps."""
        target = Target.load(save(tmp_path), layer_ids=[1], dtype=torch.bfloat16)

        assert features(target.forward(torch.tensor([[1, 2, 3]]))).dtype == torch.bfloat16
        assert target.tokenizer.decode(target.tokenizer("the moon")["input_ids"]) == "the moon"

    def test_gguf_of_a_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """`package:NAME` finds the one GGUF file of a package without importing the package."""
        package = tmp_path / "weights_in_a_wheel"
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        (package / "model.gguf").touch()
        monkeypatch.syspath_prepend(tmp_path)

        assert locate("package:weights_in_a_wheel") == (package, "model.gguf")

    @pytest.mark.filterwarnings("ignore")  # transformers' GGUF reader warns about buffers it does not write to
    def test_gguf_is_unpacked(self, tmp_path: Path) -> None:
        """Weights of a GGUF file become plain tensors, equal to what was written up to the file's own rounding."""
        path = tmp_path / "tiny.gguf"
        embedding = write_gguf(path)
        target = Target.load(path, layer_ids=[0])

        assert target.embedding_weight.dtype == torch.float32
        torch.testing.assert_close(target.embedding_weight, torch.from_numpy(embedding), atol=0.02, rtol=0.02)
        assert features(target.forward(torch.tensor([[1, 2, 3]]))).shape == (1, 3, 32)

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            (None, r"no such directory; give one that holds a Hugging Face causal language model"),
            ((), r"not a model directory; it holds neither config\.json nor a GGUF file"),
            (("a.gguf", "b.gguf"), r"several GGUF files; name one of them: a\.gguf, b\.gguf"),
        ],
    )
    def test_no_model_there(self, tmp_path: Path, files: tuple[str, ...] | None, message: str) -> None:
        """A path without one model in it is an error with the remedy."""
        directory = tmp_path / "model"
        if files is not None:
            directory.mkdir()
            for name in files:
                (directory / name).touch()

        with pytest.raises(ValueError, match=rf"target\.path .*model: {message}"):
            Target.load(directory, layer_ids=[0])

    def test_package_not_installed(self) -> None:
        """A package that is not there is an error that names it."""
        with pytest.raises(ValueError, match=r"Python package 'no_such_weights' is not installed"):
            Target.load("package:no_such_weights", layer_ids=[0])

    @pytest.mark.parametrize("damaged", ["config.json", "model.safetensors", "tokenizer.json"])
    def test_damaged_file(self, tmp_path: Path, damaged: str) -> None:
        """A damaged model, configuration or tokenizer is one error line that names the path."""
        (save(tmp_path) / damaged).write_text("{")

        with pytest.raises(ValueError, match=r"target\.path .*: transformers cannot load it as a causal") as caught:
            Target.load(tmp_path, layer_ids=[0])
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("layer_ids", "message"),
        [
            ((0, 3), r"target\.layer_ids \[0, 3\]: cannot tap layer 3 of a target with 4 layers; choose from 0 to 2"),
            ((-1,), r"cannot tap layer -1"),
            ((), r"target\.layer_ids \[\]: name at least one layer"),
            ((1, 1), r"target\.layer_ids \[1, 1\]: name at least one layer, and each only once"),
        ],
    )
    def test_layers_that_cannot_be_tapped(self, layer_ids: tuple[int, ...], message: str) -> None:
        """Layers that the target lacks, none, or one twice are refused with the setting's name."""
        with pytest.raises(ValueError, match=message):
            make_target(layer_ids)


def write_gguf(path: Path) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Write a one-of-a-kind llama of two layers with Q8_0 matrices; return its embedding table."""
    rng = np.random.default_rng(0)
    tokenizer = tiny_tokenizer()
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    shapes = {"token_embd": (len(tokens), 32)}
    for layer in range(2):
        shapes |= {f"blk.{layer}.attn_{name}": (32, 32) for name in ("q", "k", "v", "output")}
        shapes |= {
            f"blk.{layer}.ffn_gate": (64, 32),
            f"blk.{layer}.ffn_up": (64, 32),
            f"blk.{layer}.ffn_down": (32, 64),
        }
    matrices = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, matrix in matrices.items():
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", gguf.quantize(matrix, kind), raw_dtype=kind)
    for name in ("output_norm", *(f"blk.{i}.{norm}" for i in range(2) for norm in ("attn_norm", "ffn_norm"))):
        writer.add_tensor(f"{name}.weight", np.ones(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return matrices["token_embd"]
