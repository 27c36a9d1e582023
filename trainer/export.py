"""Write a drafter the way inference engines read it, and read it back.

The layout is that of published DFlash checkpoints: `model.safetensors` with the drafter's own weights only, and a
`config.json` that reads as a Qwen3 configuration with a few extra fields. The rotary base is given as `rope_theta` with
an explicit null `rope_scaling`, the form both old and new readers understand. In-block causality is only
written when it overrides the default of the layer types.

A folder is complete or absent: it is written beside its final place and renamed.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
CHECKPOINT_WEIGHTS_FILE, CHECKPOINT_CONFIG_FILE = "drafter.safetensors", "drafter_config.json"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

_PLAIN_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "initializer_range",
    "layer_types", "sliding_window", "block_size", "num_target_layers",
)  # fmt: skip
_DFLASH_FIELDS = ("mask_token_id", "target_layer_ids")
_OPTIONAL_DFLASH_FIELDS = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
_SECOND_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def export_drafter(
    state_dict: Mapping[str, Tensor], config: DrafterConfig, out_dir: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write `model.safetensors` and `config.json` into the new folder `out_dir`.

    Raises ValueError when `out_dir` exists or the tensors are not exactly those of a drafter of this `config`.
    """
    if out_dir.exists():
        raise ValueError(f"{out_dir} already exists; remove it or name another folder")
    _check_tensors(state_dict, config)
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in state_dict.items()}
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        partial.chmod(0o755)
        save_file(tensors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        (partial / CONFIG_FILE).write_text(json.dumps(drafter_config_json(config, dtype), indent=2) + "\n")
        partial.rename(out_dir)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def load_exported(folder: Path) -> Drafter:
    """Read an exported or published drafter, in fp32.

    Raises ValueError that names the file and what is wrong with it.
    """
    path = folder / CONFIG_FILE
    return _drafter(_convert(_drafter_fields(_read_json(path)), path), folder / WEIGHTS_FILE)


def load_checkpoint(folder: Path) -> Drafter:
    """Read the drafter of a training checkpoint, or of the newest one when `folder` is a whole run.

    Raises ValueError that names the file and what is wrong with it.
    """
    latest = folder / "checkpoints" / "latest"
    if latest.is_file():
        folder = latest.parent / latest.read_text().strip()
    path = folder / CHECKPOINT_CONFIG_FILE
    return _drafter(_convert(_read_json(path), path), folder / CHECKPOINT_WEIGHTS_FILE)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `dflash-export`."""
    parser = argparse.ArgumentParser(prog="dflash-export", description="Turn a checkpoint into the inference format.")
    parser.add_argument("checkpoint_dir", type=Path, help="a checkpoint, or a run directory for its newest one")
    parser.add_argument("out_dir", type=Path, help="folder to create")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the written weights (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        drafter = load_checkpoint(options.checkpoint_dir)
        export_drafter(drafter.state_dict(), drafter.config, options.out_dir, DTYPES[options.dtype])
    except (ValueError, OSError) as error:
        parser.exit(2, f"dflash-export: {error}\n")
    sys.stdout.write(f"wrote {options.out_dir}\n")


def drafter_config_json(config: DrafterConfig, dtype: torch.dtype) -> dict[str, object]:
    """What `config.json` says of a drafter whose weights are written in `dtype`."""
    default = {field.name: field.default for field in msgspec.structs.fields(DrafterConfig)}
    values: dict[str, Any] = msgspec.to_builtins(config)
    optional = [name for name in (*_OPTIONAL_DFLASH_FIELDS, *_SECOND_FIELDS) if values[name] != default[name]]
    fields = {
        "architectures": ["DFlashDraftModel" if config.selector_rank is None else "DFlash2DraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "use_sliding_window": "sliding_attention" in config.layer_types,
        "max_window_layers": config.num_hidden_layers,
        "rope_scaling": None,
        "dtype": str(dtype).removeprefix("torch."),
        "dflash_config": {name: values[name] for name in (*_DFLASH_FIELDS, *optional)},
    }
    fields |= {name: values[name] for name in _PLAIN_FIELDS}
    if config.is_causal is not None:
        fields["is_causal"] = config.is_causal
    return fields


def _drafter_fields(fields: Mapping[str, Any]) -> dict[str, object]:
    """Find our fields where published configurations keep them: in `dflash_config`, else at the top."""
    known = {"rope_theta": (fields.get("rope_parameters") or {}).get("rope_theta")}
    known |= {**fields, **(fields.get("dflash_config") or {}), "target_hidden_size": fields.get("hidden_size")}
    return {name: known[name] for name in DrafterConfig.__struct_fields__ if known.get(name) is not None}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; is this the right folder?") from None
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: {error}") from None


def _convert(fields: Mapping[str, object], path: Path) -> DrafterConfig:
    try:
        return msgspec.convert(fields, DrafterConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}") from None


def _drafter(config: DrafterConfig, weights: Path) -> Drafter:
    if not weights.is_file():
        raise ValueError(f"{weights} is missing; is this the right folder?")
    try:
        state_dict = {name: tensor.float() for name, tensor in load_file(weights).items()}
        _check_tensors(state_dict, config)
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{weights}: {error}") from None
    with torch.device("meta"):
        drafter = Drafter(config)
    drafter.load_state_dict(state_dict, assign=True)
    return drafter.eval()


def _check_tensors(state_dict: Mapping[str, Tensor], config: DrafterConfig) -> None:
    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in Drafter(config).state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
    faults = [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())]
    faults += [f"{name} is unknown" for name in sorted(found.keys() - wanted.keys())]
    faults += [
        f"{n} is {found[n]}, not {wanted[n]}" for n in sorted(wanted.keys() & found.keys()) if found[n] != wanted[n]
    ]
    if faults:
        raise ValueError("weights do not fit the drafter's configuration: " + "; ".join(faults))
