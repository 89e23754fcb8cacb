"""`HostTransfers`: copies small host tensors to the device and small results back, in one transfer each, without waiting.

Invariant: a pinned buffer is written again only after the copy from it has run, and results are read only after the copy
into them. On a CPU nothing is copied.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

ALIGNMENT = 16
"""Alignment in bytes of every tensor within a buffer."""

BUFFERS = 2
"""Two, because the copy of one step may wait behind a step that still computes while the next one is prepared."""


class Results:
    """Tensors being copied to the host."""

    def __init__(self, tensors: list[Tensor], copied: "torch.cuda.Event | None") -> None:
        self._tensors = tensors
        self._copied = copied

    def wait(self) -> list[Tensor]:
        """Wait for the copy and return the tensors on the host."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        return self._tensors


class HostTransfers:
    """Transfers of one component on one device, in the order of the current stream."""

    def __init__(self, device: torch.device, packs: bool | None = None) -> None:
        """`packs`: whether tensors share one buffer. By default they do unless the device is the host."""
        self._device = device
        self._packs = device.type != "cpu" if packs is None else packs
        self._is_cuda = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(BUFFERS)]
        self._sent: list[torch.cuda.Event | None] = [None] * BUFFERS
        self._next = 0

    def stage(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the same tensors on the device; they may be views of one buffer. The given tensors must not change any
        more.
        """
        if not self._packs:
            return list(tensors)
        offsets, size = _places(tensors)
        index = self._next
        self._next = (index + 1) % BUFFERS
        buffer = self._buffer(index, size)
        host = buffer.numpy()
        for octets, offset in _octets(tensors, offsets):
            host[offset : offset + octets.nbytes] = octets.numpy()
        packed = self._send(index, buffer[:size])
        return _unpacked(packed, tensors, offsets)

    def fetch(self, tensors: Sequence[Tensor]) -> Results:
        """Start copying tensors to the host. Later work on the same stream may overwrite the originals."""
        if not self._packs:
            return Results(list(tensors), None)
        offsets, size = _places(tensors)
        packed = torch.empty(size, dtype=torch.uint8, device=self._device)
        for octets, offset in _octets(tensors, offsets):
            packed[offset : offset + octets.nbytes].copy_(octets)
        host = self._host(size)
        host.copy_(packed, non_blocking=True)
        return Results(_unpacked(host, tensors, offsets), self._record())

    def _buffer(self, index: int, size: int) -> Tensor:
        """Return a host buffer of at least `size` bytes that no copy reads any more."""
        sent = self._sent[index]
        if sent is not None:
            sent.synchronize()
        if self._buffers[index].numel() < size:
            self._buffers[index] = self._host(2 * size)
        return self._buffers[index]

    def _send(self, index: int, buffer: Tensor) -> Tensor:
        packed = torch.empty(buffer.numel(), dtype=torch.uint8, device=self._device)
        packed.copy_(buffer, non_blocking=True)
        self._sent[index] = self._record()
        return packed

    def _host(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._is_cuda)

    def _record(self) -> "torch.cuda.Event | None":
        if not self._is_cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def _places(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return the start of each tensor and the size of all, in bytes."""
    offsets: list[int] = []
    size = 0
    for tensor in tensors:
        offsets.append(size)
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, size


def _octets(tensors: Sequence[Tensor], offsets: Sequence[int]) -> Iterator[tuple[Tensor, int]]:
    """Yield the bytes of each tensor that has any, and their place. Empty ones of NumPy have no stride to view them by."""
    for tensor, offset in zip(tensors, offsets, strict=True):
        if tensor.nbytes:
            yield tensor.contiguous().view(-1).view(torch.uint8), offset


def _unpacked(packed: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]) -> list[Tensor]:
    return [
        packed[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]
