"""`LoraSite`: one place in the model where adapters act, with the resident adapters' tensors by slot.

A fused projection (qkv, gate_up) is one site of several slices; an adapter may lack any of them, at any rank.
"""

from dataclasses import dataclass, field

import torch

MAX_RANK = 256
ALIGNMENT = 16
"""Bytes at which every installed matrix starts: the widest load of a GPU."""


@dataclass(frozen=True, slots=True)
class LoraSlice:
    """One adapter's part of one slice: A [rank, inputs], B [rank, slice outputs] (rank-major, scale folded in)."""

    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(slots=True)
class LoraSite:
    """`names` are the module names of its slices; `offsets` [slices + 1] their columns in the fused output.

    `table` [max_slots, slices, 3] int64 holds (address of A, address of B, rank) for kernels that follow pointers.
    """

    names: tuple[str, ...]
    inputs: int
    slice_sizes: tuple[int, ...]
    table: torch.Tensor
    offsets: torch.Tensor
    host_offsets: tuple[int, ...]
    slots: dict[int, tuple[LoraSlice | None, ...]] = field(default_factory=dict)

    @property
    def outputs(self) -> int:
        return self.host_offsets[-1]

    def install(self, slot: int, slices: tuple[LoraSlice | None, ...]) -> None:
        """Make an adapter's tensors known under `slot`. On CUDA each starts at a multiple of `ALIGNMENT` bytes."""
        self.slots[slot] = slices
        entries = [(0, 0, 0) if s is None else (s.a.data_ptr(), s.b.data_ptr(), s.rank) for s in slices]
        self.table[slot] = torch.tensor(entries, dtype=torch.int64)

    def remove(self, slot: int) -> None:
        """Forget `slot`; its rank becomes 0, which every kernel takes for no effect."""
        self.slots.pop(slot, None)
        self.table[slot] = 0


def make_site(
    names: tuple[str, ...], inputs: int, slice_sizes: tuple[int, ...], max_slots: int, device: torch.device
) -> LoraSite:
    """An empty site of `sum(slice_sizes)` outputs."""
    offsets = [0]
    for size in slice_sizes:
        offsets.append(offsets[-1] + size)
    return LoraSite(
        names=names,
        inputs=inputs,
        slice_sizes=slice_sizes,
        table=torch.zeros(max_slots, len(names), 3, dtype=torch.int64, device=device),
        offsets=torch.tensor(offsets, dtype=torch.int64, device=device),
        host_offsets=tuple(offsets),
    )
