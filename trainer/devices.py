"""Where workers run: what the names in `devices.targets` and `devices.drafters` mean on this machine."""

import os
from collections.abc import Sequence
from typing import Literal

import torch

from shared.wire import Device
from trainer.config import TrainerConfig
from trainer.gpu_identity import uuid_of


def target_devices(config: TrainerConfig) -> list[torch.device]:
    """The device of each target worker; raises ValueError when there is no such GPU."""
    return [_device("devices.targets", name) for name in config.devices.targets or ("cpu",)]


def drafter_devices(config: TrainerConfig) -> list[torch.device]:
    """The device of each drafter worker; raises ValueError when there is no such GPU."""
    return [_device("devices.drafters", name) for name in config.devices.drafters or ("cpu",)]


def topology(role: Literal["target", "drafter"], devices: Sequence[torch.device]) -> tuple[Device, ...]:
    """What the hello says about the workers of a role."""
    return tuple(
        Device(role, str(number), str(device), uuid_of(device, torch.cuda, os.environ))
        for number, device in enumerate(devices)
    )


def num_threads(config: TrainerConfig, local_world_size: int = 1) -> int:
    """Threads of each worker's CPU kernels: those set, else an equal share of the cores."""
    num_workers = len(target_devices(config)) + len(drafter_devices(config))
    return config.devices.cpu_threads or max(1, len(os.sched_getaffinity(0)) // (num_workers * local_world_size))


def _device(key: str, name: int | str) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    index = int(name)
    if index >= torch.cuda.device_count():
        raise ValueError(
            f'{key}: there is no CUDA device {index} ({torch.cuda.device_count()} found); "cpu" is the CPU'
        )
    return torch.device("cuda", index)
