"""Which GPU a worker is said to run on, whatever the process sees of the machine."""

import inspect

import pytest
import torch
from cuda_module import CudaModule, Properties

from trainer.gpu_identity import uuid_of

FIRST, SECOND = "11111111-1111-1111-1111-111111111111", "22222222-2222-2222-2222-222222222222"
INSTANCE = "90443af0-2fe6-57fb-86fe-54186d5a6581"
H200S = {uuid: Properties("NVIDIA H200", uuid) for uuid in (FIRST, SECOND)}


def uuids(cuda: CudaModule, visible: str | None, indices: tuple[int, ...] = (0,)) -> list[str]:
    """The UUIDs of devices under a value of CUDA_VISIBLE_DEVICES."""
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return [uuid_of(torch.device("cuda", index), cuda, environ) for index in indices]


@pytest.mark.parametrize("visible", [None, "0,1", f"GPU-{FIRST},GPU-{SECOND}", "GPU-1111,GPU-2222", " 0 , 1 "])
def test_whole_gpus_go_by_the_uuid_that_nvml_gives(visible: str | None) -> None:
    """However the visible GPUs are named, each has its own UUID behind the prefix for whole GPUs."""
    assert uuids(CudaModule(*H200S.values()), visible, (0, 1)) == [f"GPU-{FIRST}", f"GPU-{SECOND}"]


@pytest.mark.parametrize("visible", ["1,0", f"GPU-{SECOND},GPU-{FIRST}"])
def test_two_trainers_on_one_node_name_different_gpus_alike_only_by_index(visible: str) -> None:
    """Each trainer's `cuda:0` is the GPU that comes first for it."""
    one, other = CudaModule(H200S[FIRST], H200S[SECOND]), CudaModule(H200S[SECOND], H200S[FIRST])

    assert uuids(one, "0,1") == [f"GPU-{FIRST}"]
    assert uuids(other, visible) == [f"GPU-{SECOND}"]


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb"])
@pytest.mark.parametrize(
    ("visible", "reported"),
    [
        (f"MIG-{INSTANCE}", INSTANCE),
        (f"MIG-{INSTANCE.upper()}", FIRST),  # a driver that reports the whole GPU
        (f"MIG-GPU-{FIRST}/1/0", INSTANCE),  # the form of drivers before 470, which NVML no longer gives
        ("MIG-90443af0", INSTANCE),
        ("0", INSTANCE),
        (None, INSTANCE),
    ],
)
def test_an_instance_goes_by_its_own_uuid(name: str, visible: str | None, reported: str) -> None:
    """A part of a divided GPU has the prefix for instances, and the UUID it was chosen by where that is whole."""
    assert uuids(CudaModule(Properties(name, reported)), visible) == [f"MIG-{INSTANCE}"]


def test_a_cpu_has_no_uuid() -> None:
    """On a CPU torch is not asked at all."""
    assert uuid_of(torch.device("cpu"), CudaModule(), {}) == ""


@pytest.mark.parametrize("name", ["get_device_properties", "memory_stats", "reset_peak_memory_stats"])
def test_the_stand_in_is_called_as_torch_is(name: str) -> None:
    """Whatever takes the stand-in may take `torch.cuda`: the same calls fit both."""
    inspect.signature(getattr(torch.cuda, name)).bind(torch.device("cuda", 0))
    inspect.signature(getattr(CudaModule(), name)).bind(torch.device("cuda", 0))
