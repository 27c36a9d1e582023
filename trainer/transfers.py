"""Hidden states on their way: packed on the target's device, copied to the host, copied to the drafter's device.

Host buffers are equal, made once, and pinned where a GPU is involved. On a GPU every copy runs on a stream of its own,
between device buffers that are also made once; order is kept by events on the devices, so that no worker's thread waits
for a copy. On the CPU the same calls pack into the host buffer and unpack out of it, with no copy in between.

Tensor suffixes: B sequences, S positions, P packed positions (no padding), F tapped layers x hidden size.
"""
# ruff: noqa: N803, N806, N815 - tensor names carry their shape

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from trainer.batches import Batch
from trainer.instruments import cuda_event
from trainer.packing import pack_layers

NUM_DOWNLOADS = 2
"""Batches of one target that may be on their way to the host; more would only cost device memory."""


@dataclass(eq=False)
class HostBuffer:
    """Room for the hidden states of one batch.

    Attributes:
        memory: Bytes, one-dimensional.
        read: The upload that still reads it, if a GPU may be at it.
    """

    memory: Tensor
    read: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        """Bytes it holds at most."""
        return self.memory.nbytes


@dataclass(frozen=True, kw_only=True, eq=False)
class HiddenBatch:
    """One batch and the target's hidden states for it, on the host.

    Attributes:
        batch: Token ids, masks and lengths.
        hidden_PF: Outputs of the tapped layers at the real tokens, sequence after sequence, in `buffer`.
        buffer: Goes back to the queue when the hidden states have been read.
        written: The download that still writes it, if a GPU may be at it.
    """

    batch: Batch
    hidden_PF: Tensor
    buffer: HostBuffer
    written: torch.cuda.Event | None = None


def host_buffers(count: int, num_bytes: int, *, pinned: bool) -> list[HostBuffer]:
    """Make all buffers that the hidden states of a run ever pass through on the host."""
    return [HostBuffer(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)) for _ in range(count)]


def real_positions(batch: Batch) -> Tensor:
    """Indices of the real tokens in the flattened batch [P]; computed on the host, where the lengths are."""
    return batch.attention_mask.flatten().nonzero().flatten()


class Download:
    """Packs hidden states and brings them to the host. One thread only.

    Args:
        device: Where the target runs.
        num_bytes: Of the largest batch.
        dtype: In which hidden states travel; layers that compute in another one are cast.
    """

    def __init__(self, device: torch.device, num_bytes: int, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._on_gpu = device.type == "cuda"
        self._stream = _stream(device) if self._on_gpu else None
        count = NUM_DOWNLOADS if self._on_gpu else 0
        self._packed = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(count)]
        self._copied = [cuda_event() for _ in range(count)]
        self._turn = 0

    def stream(self) -> AbstractContextManager[object]:
        """The context in which `copy` is to be called and timed."""
        return torch.cuda.stream(self._stream) if self._stream else nullcontext()

    def pack(self, layers: Sequence[Tensor], batch: Batch, buffer: HostBuffer) -> Tensor:
        """Gather the real tokens of the tapped layers into one contiguous buffer [P, F], on the layers' device."""
        memory = buffer.memory
        if self._on_gpu:
            self._turn = (self._turn + 1) % NUM_DOWNLOADS
            memory = self._packed[self._turn]
            torch.cuda.current_stream().wait_event(self._copied[self._turn])
        packed_PF = _as(memory, (sum(batch.lengths), sum(layer.shape[-1] for layer in layers)), self._dtype)
        positions_P = real_positions(batch).to(self._device, non_blocking=True)
        pack_layers(layers, positions_P, packed_PF)
        return packed_PF

    def copy(self, packed_PF: Tensor, batch: Batch, buffer: HostBuffer) -> HiddenBatch:
        """Start the copy of what `pack` returned to the host."""
        if self._stream is None:
            return HiddenBatch(batch=batch, hidden_PF=packed_PF, buffer=buffer)
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        if buffer.read is not None:
            self._stream.wait_event(buffer.read)
        hidden_PF = _as(buffer.memory, packed_PF.shape, packed_PF.dtype)
        hidden_PF.copy_(packed_PF, non_blocking=True)
        self._copied[self._turn].record(self._stream)
        # An event of its own: the one above is recorded anew before the drafter may have looked at this one.
        written = cuda_event()
        written.record(self._stream)
        return HiddenBatch(batch=batch, hidden_PF=hidden_PF, buffer=buffer, written=written)


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrival:
    """A batch whose hidden states are on the drafter's device, or on their way to it.

    Attributes:
        batch: Token ids, masks and lengths, on the host.
        hidden: [P, F] packed on a GPU, [B, S, F] unpacked on the CPU.
        slot: Which of the device buffers they are in.
    """

    batch: Batch
    hidden: Tensor
    slot: int


class Upload:
    """Brings hidden states to a drafter's device. One thread only.

    Args:
        device: Where the drafter runs.
        count: Batches that may be there or on their way at a time.
        num_bytes: Of the largest batch.
    """

    def __init__(self, device: torch.device, count: int, num_bytes: int) -> None:
        self._device = device
        self._stream = _stream(device) if device.type == "cuda" else None
        self._count = count
        num_buffers = count if self._stream else 0
        self._memory = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(num_buffers)]
        self._arrived = [cuda_event() for _ in range(num_buffers)]
        self._unpacked = [cuda_event() for _ in range(num_buffers)]
        self._turn = 0

    def stream(self) -> AbstractContextManager[object]:
        """The context in which `start` is to be called and timed."""
        return torch.cuda.stream(self._stream) if self._stream else nullcontext()

    def start(self, item: HiddenBatch, timed: AbstractContextManager[None]) -> Arrival:
        """Start to copy, inside `timed`; after this the host buffer may go back to the queue."""
        if self._stream is None:
            if item.written is not None:
                # A target on a GPU and a drafter on the CPU: here somebody has to wait.
                item.written.synchronize()
            item.buffer.read = None
            with timed:
                return Arrival(batch=item.batch, hidden=_unpack(item.hidden_PF, item.batch), slot=0)
        slot = self._turn = (self._turn + 1) % self._count
        if item.written is not None:
            self._stream.wait_event(item.written)
        self._stream.wait_event(self._unpacked[slot])
        hidden_PF = _as(self._memory[slot], item.hidden_PF.shape, item.hidden_PF.dtype)
        with timed:
            hidden_PF.copy_(item.hidden_PF, non_blocking=True)
        self._arrived[slot].record(self._stream)
        item.buffer.read = cuda_event()
        item.buffer.read.record(self._stream)
        return Arrival(batch=item.batch, hidden=hidden_PF, slot=slot)

    def finish(self, arrival: Arrival) -> Tensor:
        """Return the hidden states [B, S, F] with zeros at the padding, in order on the current stream."""
        if self._stream is None:
            return arrival.hidden
        compute = torch.cuda.current_stream()
        compute.wait_event(self._arrived[arrival.slot])
        hidden_BSF = _unpack(arrival.hidden, arrival.batch)
        self._unpacked[arrival.slot].record(compute)
        return hidden_BSF


def _unpack(hidden_PF: Tensor, batch: Batch) -> Tensor:
    num_sequences, num_positions = batch.input_ids.shape
    padded = hidden_PF.new_zeros(num_sequences * num_positions, hidden_PF.shape[-1])
    padded.index_copy_(0, real_positions(batch).to(hidden_PF.device, non_blocking=True), hidden_PF)
    return padded.view(num_sequences, num_positions, -1)


def _as(memory: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The beginning of `memory` as a tensor of this shape and dtype."""
    return memory[: prod(shape) * dtype.itemsize].view(dtype).view(*shape)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
