"""Which GPU a worker runs on, in the driver's own terms.

CUDA numbers the GPUs of each process anew: `cuda:0` is whichever CUDA_VISIBLE_DEVICES names first, and two trainers on
one machine both have one. The UUID is the same for everybody, NVML included, so it is what the hello says. torch gives
it without the prefix that NVML puts before it: `GPU-` for a whole GPU, `MIG-` for an instance of a divided one.
"""

import re
from collections.abc import Mapping
from typing import Protocol

import torch

_MIG_NAME = re.compile(r" MIG (\d+c\.)?\d+g\.\d+gb")
"""CUDA writes the profile of an instance behind the name of its GPU: `NVIDIA A100-SXM4-40GB MIG 1g.5gb`."""
_MIG_UUID = re.compile(r"MIG-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


class DeviceProperties(Protocol):
    """What is read of `torch.cuda.get_device_properties`."""

    @property
    def name(self) -> str:
        """As the driver calls it."""

    @property
    def uuid(self) -> object:
        """Its text is the UUID without a prefix."""


class DeviceModule(Protocol):
    """The part of `torch.cuda` that knows devices."""

    def get_device_properties(self, device: torch.device, /) -> DeviceProperties:
        """Describe a device."""


def uuid_of(device: torch.device, cuda: DeviceModule, environ: Mapping[str, str]) -> str:
    """The UUID of a device as NVML writes it; empty on a CPU.

    An instance of a divided GPU that CUDA_VISIBLE_DEVICES names in full goes by that name: older drivers report the
    UUID of the whole GPU for each of its instances.

    Args:
        device: with an index, which counts visible devices.
        cuda: `torch.cuda`.
        environ: of this process.
    """
    if device.type != "cuda":
        return ""
    properties = cuda.get_device_properties(device)
    if not _MIG_NAME.search(properties.name):
        return f"GPU-{properties.uuid}"
    named = dict(enumerate(environ.get("CUDA_VISIBLE_DEVICES", "").split(","))).get(device.index, "").strip()
    return f"MIG-{named[4:].lower() if _MIG_UUID.fullmatch(named) else properties.uuid}"
