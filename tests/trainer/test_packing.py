"""Packing of the tapped layers: the kernel, interpreted or compiled, against its torch twin, that against slices."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import triton
from kernel_copies import copy_of_kernels
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trainer.batches import Batch
from trainer.packing import pack_layers
from trainer.transfers import Download, host_buffers, real_positions

Pack = Callable[[Sequence[Tensor], Tensor, Tensor], None]
FLOATS, HALVES = torch.float32, torch.bfloat16
RAGGED = (5, 1, 9)
CASES = [
    pytest.param(RAGGED, (FLOATS,) * 3, FLOATS, 40, id="ragged"),
    pytest.param(RAGGED, (FLOATS,), FLOATS, 40, id="one-layer"),
    pytest.param(RAGGED, (HALVES,) * 9, HALVES, 24, id="many-layers"),
    pytest.param(RAGGED, (FLOATS,) * 3, HALVES, 40, id="bf16-from-fp32"),
    pytest.param(RAGGED, (HALVES, FLOATS, HALVES), HALVES, 40, id="layers-of-two-dtypes"),
    pytest.param(RAGGED, (HALVES,) * 2, FLOATS, 40, id="fp32-from-bf16"),
    pytest.param((4, 0, 2), (FLOATS,) * 3, HALVES, 40, id="an-empty-sample"),
    pytest.param((0, 0), (FLOATS,) * 3, FLOATS, 40, id="nothing-but-empty-samples"),
    pytest.param((6,), (FLOATS,) * 2, FLOATS, 1, id="one-value-wide"),
    pytest.param((3, 2), (FLOATS,) * 2, HALVES, 2500, id="wider-than-a-block"),
]
cases = pytest.mark.parametrize(("lengths", "layer_dtypes", "dtype", "width"), CASES)


@pytest.fixture
def interpreted_pack(monkeypatch: pytest.MonkeyPatch) -> Pack:
    """The kernel's launcher, interpreted."""
    pack: Pack = copy_of_kernels(monkeypatch, interpreted=True).pack_layers
    return pack


def _batch(lengths: Sequence[int]) -> Batch:
    """A batch of these lengths, with two more positions of padding than it needs."""
    mask = torch.arange(max(lengths) + 2) < torch.tensor(lengths)[:, None]
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    return Batch(index=0, input_ids=ids, attention_mask=mask, loss_mask=mask, lengths=tuple(lengths))


def _layers(batch: Batch, dtypes: Sequence[torch.dtype], width: int, *, hard: bool = True) -> list[Tensor]:
    """Outputs of layers, not a number at padding; on demand the first token's values are hard to cast."""
    generator = torch.Generator().manual_seed(6)
    layers = []
    for dtype in dtypes:
        layer = torch.randn(*batch.input_ids.shape, width, generator=generator)
        # Halfway between two of bf16, twice; beyond its largest; a subnormal; signed zero and infinity.
        values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, 1e-40, -0.0, -float("inf")])[:width]
        if hard:
            layer[0, 0, : len(values)] = values
        layer[~batch.attention_mask] = float("nan")
        layers.append(layer.to(dtype))
    return layers


def _packed(pack: Pack, layers: Sequence[Tensor], batch: Batch, dtype: torch.dtype) -> Tensor:
    """What a packing leaves in a buffer on the layers' device that held something else."""
    device, width = layers[0].device, len(layers) * layers[0].shape[-1]
    packed = torch.full((sum(batch.lengths), width), 77.0, dtype=dtype, device=device)
    pack(layers, real_positions(batch).to(device), packed)
    return packed


def _sliced(layers: Sequence[Tensor], batch: Batch, dtype: torch.dtype) -> Tensor:
    """The same by slices: sequence after sequence, layers side by side."""
    whole = torch.cat([layer.to(dtype) for layer in layers], dim=-1)
    return torch.cat([whole[number, :length] for number, length in enumerate(batch.lengths)])


@cases
def test_torch_twin_equals_slices(
    lengths: Sequence[int], layer_dtypes: Sequence[torch.dtype], dtype: torch.dtype, width: int
) -> None:
    """The twin writes each sequence's real tokens one after another and nothing of the padding."""
    batch = _batch(lengths)
    layers = _layers(batch, layer_dtypes, width)

    assert torch.equal(_packed(pack_layers, layers, batch, dtype), _sliced(layers, batch, dtype))


@cases
def test_interpreted_kernel_equals_torch(
    interpreted_pack: Pack, lengths: Sequence[int], layer_dtypes: Sequence[torch.dtype], dtype: torch.dtype, width: int
) -> None:
    """The kernel leaves the same values: the very same where nothing is rounded, or was before it is cast."""
    batch = _batch(lengths)
    layers = _layers(batch, layer_dtypes, width, hard=False)
    rounded = [layer.to(dtype).to(layer.dtype) for layer in layers]

    assert torch.equal(_packed(interpreted_pack, rounded, batch, dtype), _packed(pack_layers, rounded, batch, dtype))
    # The interpreter cuts bits off where the compiled kernel rounds (below): one step of bf16.
    packed, twin = _packed(interpreted_pack, layers, batch, dtype), _packed(pack_layers, layers, batch, dtype)
    torch.testing.assert_close(packed, twin, rtol=2**-7, atol=0.0)


def test_interpreted_kernel_takes_layers_that_are_not_contiguous(interpreted_pack: Pack) -> None:
    """A layer that is a view, as of a wrapper that slices its output, is read by its own strides."""
    batch = _batch(RAGGED)
    views = [layer[..., ::2] for layer in _layers(batch, (FLOATS,) * 2, 48)]

    assert torch.equal(_packed(interpreted_pack, views, batch, FLOATS), _sliced(views, batch, FLOATS))


def test_download_casts_to_the_dtype_that_travels() -> None:
    """Layers in fp32 arrive in the host buffer as bf16, at its beginning, without padding."""
    batch = _batch(RAGGED)
    layers = _layers(batch, (FLOATS,) * 3, 40)
    (buffer,) = host_buffers(1, sum(RAGGED) * 3 * 40 * HALVES.itemsize, pinned=False)
    download = Download(torch.device("cpu"), buffer.nbytes, HALVES)

    hidden = download.copy(download.pack(layers, batch, buffer), batch, buffer).hidden_PF

    assert hidden.data_ptr() == buffer.memory.data_ptr()
    assert torch.equal(hidden, _sliced(layers, batch, HALVES))


def test_compiled_kernel_rounds_to_nearest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a GPU too the kernel compiles for one, loads four words at a time and rounds bf16 as torch does."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = copy_of_kernels(monkeypatch, interpreted=False)._pack_kernel
    signature = {
        "layers": ("*fp32",) * 5,
        "positions": "*i64",
        "packed": "*bf16",
        "layer_width": "i32",
        "NUM_LAYERS": "constexpr",
        "BLOCK": "constexpr",
    }
    aligned = {place: [["tt.divisibility", 16]] for place in [*((0, number) for number in range(5)), (1,), (2,), (3,)]}
    source = ASTSource(kernel, signature, {(4,): 5, (5,): 1024}, aligned)

    code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

    assert "cvt.rn.bf16" in code
    assert "cvt.rz" not in code
    assert code.count("st.global.v4") == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@cases
def test_gpu_equals_cpu(
    lengths: Sequence[int], layer_dtypes: Sequence[torch.dtype], dtype: torch.dtype, width: int
) -> None:
    """The compiled kernel leaves the very values that the twin leaves on the CPU."""
    batch = _batch(lengths)
    layers = _layers(batch, layer_dtypes, width)

    packed = _packed(pack_layers, [layer.cuda() for layer in layers], batch, dtype)

    assert torch.equal(packed.cpu(), _packed(pack_layers, layers, batch, dtype))
