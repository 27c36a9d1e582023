"""Exported drafters load into the reference package, read back exactly, and fail with one clear line."""

import json
from pathlib import Path

import dflash.model
import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import SECOND, random_prompts, tapped, tiny_config, tiny_drafter, tiny_target

from trainer.anchors import block_masks
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
from trainer.export import export_drafter, load_checkpoint, load_exported, main

VARIANTS = [
    pytest.param({"layout": "full", "rope_theta": 5e5, "rms_norm_eps": 1e-5}, id="full"),
    pytest.param({"layout": "sliding"}, id="sliding"),
    pytest.param({"layout": "sliding", "is_causal": False}, id="none causal"),
    pytest.param(
        {"input_embedding_scale": 8.0, "output_multiplier": 0.5, "final_logit_softcapping": 30.0}, id="scaled"
    ),
    pytest.param(SECOND, id="DFlash 2"),
]


def _checkpoint(folder: Path, drafter: Drafter) -> Path:
    folder.mkdir(parents=True)
    save_file(drafter.state_dict(), folder / "drafter.safetensors")
    (folder / "drafter_config.json").write_bytes(msgspec.json.encode(drafter.config))
    return folder


@pytest.mark.parametrize("changes", VARIANTS)
@torch.no_grad()
def test_reference_loads_the_export(changes: dict[str, object], tmp_path: Path) -> None:
    """The reference finds every weight and no other, reads every setting, and computes the same block."""
    config = tiny_config(**changes)  # type: ignore[arg-type]
    drafter, target = tiny_drafter(config), tiny_target()
    export_drafter(drafter.state_dict(), config, tmp_path / "out", torch.float32)

    written = json.loads((tmp_path / "out" / "config.json").read_text())
    reference, info = getattr(dflash.model, written["architectures"][0]).from_pretrained(
        tmp_path / "out", output_loading_info=True
    )

    assert {name: list(keys) for name, keys in info.items() if keys} == {}
    assert reference.block_size == config.block_size
    assert reference.mask_token_id == config.mask_token_id
    assert reference.target_layer_ids == list(config.target_layer_ids)
    context = tapped(target, torch.tensor(random_prompts(1, seed=4)), config)
    noise = target.get_input_embeddings()(torch.tensor([[7, 96, 96, 96]])) * config.input_embedding_scale
    positions, masks = torch.arange(15)[None], block_masks(torch.tensor([[11]]), torch.tensor([[True]]), 11, config)
    ours = drafter(noise, context, positions, masks)
    theirs = reference.eval()(position_ids=positions, noise_embedding=noise, target_hidden=context)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    scale = dflash.model._draft_value(reference.config, "input_embedding_scale", 1.0)
    assert scale == config.input_embedding_scale
    assert dflash.model._draft_value(reference.config, "output_multiplier", 1.0) == config.output_multiplier
    assert dflash.model._draft_value(reference.config, "final_logit_softcapping") == config.final_logit_softcapping


@pytest.mark.parametrize("changes", VARIANTS)
def test_export_reads_back(changes: dict[str, object], tmp_path: Path) -> None:
    """Configuration and fp32 weights come back exactly; bf16 ones come back rounded once, as fp32."""
    config = tiny_config(**changes)  # type: ignore[arg-type]
    drafter = tiny_drafter(config)
    export_drafter(drafter.state_dict(), config, tmp_path / "exact", torch.float32)
    export_drafter(drafter.state_dict(), config, tmp_path / "rounded")

    exact, rounded = load_exported(tmp_path / "exact"), load_exported(tmp_path / "rounded")

    assert exact.config == rounded.config == config
    assert {t.dtype for t in load_file(tmp_path / "rounded" / "model.safetensors").values()} == {torch.bfloat16}
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(exact.state_dict()[name], tensor), name
        assert torch.equal(rounded.state_dict()[name], tensor.bfloat16().float()), name
    assert sorted(p.name for p in tmp_path.iterdir()) == ["exact", "rounded"]


def test_config_keeps_the_keys_engines_look_for(tmp_path: Path) -> None:
    """The written configuration has the published keys, and says nothing about causality by default."""
    config = tiny_config("sliding")
    export_drafter(tiny_drafter(config).state_dict(), config, tmp_path / "out")

    fields = json.loads((tmp_path / "out" / "config.json").read_text())

    assert fields["architectures"] == ["DFlashDraftModel"]
    assert fields["model_type"] == "qwen3"
    assert fields["rope_theta"] == 1e6
    assert fields["rope_scaling"] is None
    assert fields["dflash_config"] == {"mask_token_id": 96, "target_layer_ids": [1, 3, 5]}
    assert (fields["use_sliding_window"], fields["sliding_window"], fields["max_window_layers"]) == (True, 8, 3)
    assert fields["dtype"] == "bfloat16"
    assert "is_causal" not in fields


def test_published_newer_layout_is_read(tmp_path: Path) -> None:
    """A config with rope_parameters and block_size inside dflash_config, as newer checkpoints have it, reads too."""
    config = tiny_config(rope_theta=5e5)
    export_drafter(tiny_drafter(config).state_dict(), config, tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    fields = json.loads(path.read_text())
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
    fields["dflash_config"]["block_size"] = fields.pop("block_size")
    path.write_text(json.dumps(fields))

    assert load_exported(tmp_path / "out").config == config


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_command_exports_the_newest_checkpoint_of_a_run(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Given a run, the command follows `checkpoints/latest`; given a checkpoint, it takes that one."""
    newest = tiny_drafter(tiny_config("sliding"))
    _checkpoint(tmp_path / "run" / "checkpoints" / "step-10", tiny_drafter(tiny_config(), weight_factor=1.0))
    checkpoint = _checkpoint(tmp_path / "run" / "checkpoints" / "step-20", newest)
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step-20\n")

    for source, out in [(tmp_path / "run", tmp_path / "a"), (checkpoint, tmp_path / "b")]:
        main([str(source), str(out), "--dtype", dtype])

        assert capsys.readouterr().out == f"wrote {out}\n"
        loaded = load_exported(out)
        assert loaded.config == newest.config
        torch.testing.assert_close(loaded.fc.weight, newest.fc.weight, rtol=1e-2, atol=0)


def _missing_config(folder: Path) -> None:
    (folder / "drafter_config.json").unlink()


def _broken_config(folder: Path) -> None:
    (folder / "drafter_config.json").write_text("{")


def _contradicting_config(folder: Path) -> None:
    path = folder / "drafter_config.json"
    path.write_text(path.read_text().replace('"mask_token_id":96', '"mask_token_id":97'))


def _missing_weights(folder: Path) -> None:
    (folder / "drafter.safetensors").unlink()


def _broken_weights(folder: Path) -> None:
    (folder / "drafter.safetensors").write_bytes(b"not a tensor file")


def _foreign_weights(folder: Path) -> None:
    save_file({"fc.weight": torch.zeros(2, 2), "extra": torch.zeros(1)}, folder / "drafter.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_missing_config, "drafter_config.json is missing; is this the right folder?"),
        (_broken_config, "drafter_config.json: Input data was truncated"),
        (_contradicting_config, "drafter_config.json: drafter config: mask_token_id=97 must be a row of the embedding"),
        (_missing_weights, "drafter.safetensors is missing"),
        (_broken_weights, "drafter.safetensors: "),
        (_foreign_weights, "extra is unknown; fc.weight is (2, 2), not (64, 192)"),
    ],
)
def test_bad_checkpoint(damage: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each damaged checkpoint ends the command with one line naming the file, exit 2, and nothing written."""
    assert callable(damage)
    checkpoint = _checkpoint(tmp_path / "checkpoint", tiny_drafter(tiny_config()))
    damage(checkpoint)

    with pytest.raises(SystemExit) as exit_info:
        main([str(checkpoint), str(tmp_path / "out")])

    error = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert message in error
    assert error.startswith("dflash-export: ")
    assert error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    """An export never replaces what is there."""
    drafter = tiny_drafter(tiny_config())
    (tmp_path / "out").mkdir()

    with pytest.raises(ValueError, match="out already exists; remove it or name another folder"):
        export_drafter(drafter.state_dict(), drafter.config, tmp_path / "out")


def test_wrong_tensors_are_not_written(tmp_path: Path) -> None:
    """Weights that do not fit the configuration are refused before anything is created."""
    drafter = tiny_drafter(tiny_config())
    other: DrafterConfig = tiny_config(intermediate_size=32)

    with pytest.raises(ValueError, match=r"mlp\.down_proj\.weight is \(64, 128\), not \(64, 32\)"):
        export_drafter(drafter.state_dict(), other, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_is_read_in_fp32(tmp_path: Path) -> None:
    """A checkpoint's drafter comes back bit for bit."""
    drafter = tiny_drafter(tiny_config())

    loaded = load_checkpoint(_checkpoint(tmp_path / "checkpoint", drafter))

    assert loaded.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
