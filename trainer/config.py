"""Every setting of a run, by section; `dflash-train --help` prints this table.

Order of precedence, strongest first: command line, environment (`DFLASH_TRAIN_STEPS`), the run's own `config.json`
when it is resumed, preset, default. Paths are strings here: a target may also be `package:NAME` or `embedded`.
"""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.remote import check_remote
from shared.settings import (
    Layer,
    SettingsError,
    assignments_layer,
    environment_layer,
    nearest,
    resolve,
    settings_of,
    toml_layer,
)

Positive = Annotated[int, Meta(ge=1)]
DType = Literal["float32", "bfloat16"]
DeviceName = Annotated[int, Meta(ge=0)] | Literal["cpu"]


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the run is called."""

    id: Annotated[
        str,
        Meta(
            pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$",
            max_length=56,
            description="name of the run, everywhere; empty makes one from preset, date and time",
        ),
    ] = ""


class TargetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The frozen model that is drafted for."""

    path: Annotated[str, Meta(description="embedded, a Hugging Face directory, a GGUF file, or package:NAME")] = (
        "embedded"
    )
    layer_ids: Annotated[
        tuple[int, ...], Meta(description="decoder layers to tap, 0-based; empty spreads num_taps over the target")
    ] = ()
    num_taps: Annotated[int, Meta(ge=1, description="how many layers to tap when layer_ids is empty")] = 3
    dtype: Annotated[DType, Meta(description="of the target's weights and hidden states in training")] = "float32"


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The conversations to learn from."""

    path: Annotated[str, Meta(description="JSONL of conversations; empty lets the target answer built-in prompts")] = ""
    max_length: Annotated[int, Meta(ge=8, description="longest sequence, in tokens; the rest is cut off")] = 256
    num_held_out: Annotated[int, Meta(ge=1, description="samples kept back for the evaluation")] = 16
    num_prompts: Annotated[int, Meta(ge=2, description="built-in prompts the target answers when path is empty")] = 600
    max_new_tokens: Annotated[int, Meta(ge=2, description="longest answer to a built-in prompt, in tokens")] = 160


class DrafterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model that is trained. Sizes left at 0 are the target's own."""

    num_layers: Annotated[int, Meta(ge=1, description="drafter layers")] = 2
    block_size: Annotated[int, Meta(ge=2, le=64, description="tokens per block, the known one included")] = 8
    layer_types: Annotated[
        tuple[Literal["full_attention", "sliding_attention"], ...],
        Meta(description="attention of each layer; empty is full_attention everywhere"),
    ] = ()
    sliding_window: Annotated[int | None, Meta(description="window of sliding layers, in tokens")] = None
    intermediate_size: Annotated[int, Meta(ge=0, description="width of the feed-forward layer; 0 takes 3x hidden")] = 0
    num_attention_heads: Annotated[int, Meta(ge=0, description="0 takes the target's")] = 0
    num_key_value_heads: Annotated[int, Meta(ge=0, description="0 takes the target's")] = 0
    head_dim: Annotated[int, Meta(ge=0, description="0 takes the target's")] = 0
    conv_kernel_size: Annotated[
        Positive | None, Meta(description="set with the next three for a DFlash 2 drafter; published ones have 2")
    ] = None
    conv_group_size: Annotated[Positive | None, Meta(description="DFlash 2: channels a group; published 16")] = None
    selector_rank: Annotated[
        Positive | None, Meta(description="DFlash 2: of the candidate selector, which is not trained; published 256")
    ] = None
    selector_top_k: Annotated[Positive | None, Meta(description="DFlash 2: candidates a slot; published 16")] = None
    mask_token_id: Annotated[
        int | None, Meta(description="token fed in masked slots; unset takes the tokenizer's or an unused row")
    ] = None


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The optimisation."""

    steps: Annotated[int, Meta(ge=1, description="optimizer steps of the whole schedule")] = 400
    batch_size: Annotated[int, Meta(ge=1, description="sequences per batch")] = 8
    accumulate: Annotated[
        int, Meta(ge=0, description="batches per optimizer step, over all drafters; 0 is one for each drafter")
    ] = 0
    optimizer: Annotated[
        Literal["adamw", "muon"],
        Meta(description="adamw for everything, or muon for the matrices and adamw for the rest"),
    ] = "adamw"
    learning_rate: Annotated[float, Meta(gt=0, description="peak, reached after the warm-up")] = 6e-4
    warmup_ratio: Annotated[float, Meta(ge=0, lt=1, description="share of the steps that warm up linearly")] = 0.04
    weight_decay: Annotated[float, Meta(ge=0, description="decoupled, of every optimizer")] = 0.0
    grad_clip: Annotated[float, Meta(gt=0, description="largest gradient norm")] = 1.0
    num_anchors: Annotated[int, Meta(ge=1, description="blocks per sequence, drawn anew each epoch")] = 32
    objective: Annotated[
        Literal["decay", "dpace"],
        Meta(description="decay weighs slots by loss_decay_gamma, dpace by what each adds to the accepted length"),
    ] = "decay"
    dpace_alpha: Annotated[float, Meta(ge=0, le=1, description="dpace: 0 trusts the drafter's probabilities as is")] = (
        0.5
    )
    gpu_attention: Annotated[
        Literal["masked", "flex"],
        Meta(description="on GPUs: masked computes all scores, flex compiles a kernel that skips what nobody sees"),
    ] = "masked"
    loss_decay_gamma: Annotated[float, Meta(gt=0, description="slot k weighs exp(-(k-1)/gamma)")] = 4.0
    dtype: Annotated[DType, Meta(description="of the drafter's compute; its weights stay float32")] = "float32"
    seed: Annotated[int, Meta(ge=0, description="of initial weights, data order and anchors")] = 0


class QueueConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The queue of hidden states between target and drafter."""

    max_bytes: Annotated[int, Meta(ge=1, description="most bytes of hidden states on the host")] = 4 * 1024**3
    max_items: Annotated[int, Meta(ge=1, description="most batches in the queue, those being made included")] = 8
    hs_min_ready: Annotated[int, Meta(ge=1, description="batches to choose the longest from; 1 keeps the order")] = 1
    oldest_every: Annotated[int, Meta(ge=1, description="every so many takes the oldest batch goes first")] = 8
    prefetch: Annotated[int, Meta(ge=0, description="batches copied to a drafter ahead of the one it learns from")] = 1


class EvaluationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Real speculative decoding at the end of a run."""

    num_prompts: Annotated[int, Meta(ge=0, description="held-out prompts to decode; 0 skips the evaluation")] = 16
    max_new_tokens: Annotated[int, Meta(ge=1, description="tokens to decode per prompt")] = 96


class CheckpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is saved while training."""

    every_steps: Annotated[int, Meta(ge=1, description="steps between checkpoints")] = 200
    keep: Annotated[int, Meta(ge=1, description="newest checkpoints to keep")] = 2


class DevicesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the workers run, one for each entry. What is trained does not depend on it, up to rounding."""

    targets: Annotated[
        tuple[DeviceName, ...], Meta(description='a target worker each: GPU number or "cpu"; [] is ["cpu"]')
    ] = ()
    drafters: Annotated[
        tuple[DeviceName, ...], Meta(description='a drafter worker each: GPU number or "cpu"; [] is ["cpu"]')
    ] = ()
    cpu_threads: Annotated[int, Meta(ge=0, description="threads of each worker's kernels; 0 shares the cores")] = 0


class TelemetryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What leaves the trainer, never what it trains."""

    enabled: Annotated[bool, Meta(description="publish counters for a sidecar")] = True
    interval_s: Annotated[float, Meta(gt=0, le=3600, description="seconds between snapshots")] = 1.0
    allocator_interval_s: Annotated[
        float, Meta(gt=0, le=3600, description="seconds between readings of a GPU's allocator")
    ] = 5.0
    ring_bytes: Annotated[int, Meta(ge=4096, description="history kept for a sidecar that comes back")] = 64 * 1024**2
    linger_s: Annotated[float, Meta(ge=0, description="longest wait at the end for a sidecar that restarts")] = 5.0
    endpoint: Annotated[
        str, Meta(description="empty is a local socket; tcp://HOST:PORT for a sidecar elsewhere, with keys")
    ] = ""
    keys: Annotated[str, Meta(description="directory trainer/ of the keys that `dflash-sidecar keys DIR` made")] = ""
    audit_path: Annotated[str, Meta(description="for tests: append every published record to this file")] = ""


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of one run."""

    run: RunConfig = RunConfig()
    target: TargetConfig = TargetConfig()
    data: DataConfig = DataConfig()
    drafter: DrafterSettings = DrafterSettings()
    train: TrainConfig = TrainConfig()
    queue: QueueConfig = QueueConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    devices: DevicesConfig = DevicesConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    def flat(self) -> dict[str, str | int | float | bool | None]:
        """Every setting under its dotted key, lists as text, for the hello and for people."""
        built = msgspec.to_builtins(self)
        values: dict[str, str | int | float | bool | None] = {}
        for setting in settings_of(TrainerConfig):
            section, key = setting.key.split(".")
            value = built[section][key]
            values[setting.key] = json.dumps(value) if isinstance(value, list | tuple) else value
        return values


def preset_names() -> list[str]:
    """Names of the shipped presets."""
    folder = resources.files("trainer") / "presets"
    return sorted(Path(p.name).stem for p in folder.iterdir() if p.name.endswith(".toml"))


def preset_layer(name: str) -> Layer:
    """Read a shipped preset; raises SettingsError naming the presets there are."""
    if name not in preset_names():
        raise SettingsError(f"--preset {name}: no such preset{nearest(name, preset_names())}; have {preset_names()}")
    with resources.as_file(resources.files("trainer") / "presets" / f"{name}.toml") as path:
        layer = toml_layer(path, f"preset {name}")
    return msgspec.structs.replace(layer, values={k: v for k, v in layer.values.items() if k != "description"})


def preset_description(name: str) -> str:
    """What a preset says about itself."""
    with resources.as_file(resources.files("trainer") / "presets" / f"{name}.toml") as path:
        return str(toml_layer(path).values.get("description", ""))


def load_config(
    *, preset: str | None, assignments: Sequence[str], environ: Mapping[str, str], saved: Path | None = None
) -> TrainerConfig:
    """Resolve the settings of a run.

    Args:
        preset: name of a shipped preset; None starts from the defaults.
        assignments: `key=value` arguments.
        environ: environment variables.
        saved: `config.json` of the run being resumed, which then stands in for the preset.

    Raises:
        SettingsError: an unknown key or a bad value, with its place and the remedy.
    """
    layers = [assignments_layer(assignments), environment_layer(TrainerConfig, environ)]
    if saved is not None:
        layers.append(saved_layer(saved))
    elif preset is not None:
        layers.append(preset_layer(preset))
    config = resolve(TrainerConfig, layers)
    if config.queue.hs_min_ready > config.queue.max_items:
        raise SettingsError(
            f"queue.hs_min_ready={config.queue.hs_min_ready} exceeds queue.max_items={config.queue.max_items}: lower it"
        )
    if config.telemetry.endpoint:
        check_remote("telemetry.endpoint", config.telemetry.endpoint, "telemetry.keys", config.telemetry.keys)
    num_types, num_layers = len(config.drafter.layer_types), config.drafter.num_layers
    if num_types not in {0, num_layers}:
        raise SettingsError(f"drafter.layer_types names {num_types} layers, drafter.num_layers is {num_layers}")
    return config


def with_batches_per_step(config: TrainerConfig, world_size: int) -> TrainerConfig:
    """Fill in `train.accumulate` and check that every drafter of every process gets an equal share of it.

    Raises:
        SettingsError: it does not divide.
    """
    num_drafters = world_size * len(config.devices.drafters or ("cpu",))
    accumulate = config.train.accumulate or num_drafters
    if accumulate % num_drafters:
        raise SettingsError(
            f"train.accumulate={accumulate} does not divide among {num_drafters} drafters ({world_size} processes with "
            f"{num_drafters // world_size} each): change devices.drafters, or in a new run make it a multiple"
        )
    return msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, accumulate=accumulate))


def saved_layer(path: Path) -> Layer:
    """Read a run's saved settings; raises SettingsError."""
    try:
        return Layer(str(path), msgspec.json.decode(path.read_bytes(), type=dict))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}; --resume needs a run directory, give it with --out") from error
    except msgspec.DecodeError as error:
        raise SettingsError(f"{path}: not valid JSON: {error}") from error
