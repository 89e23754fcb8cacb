"""`LoraSite`: one place in the model where adapters act, with the resident adapters' tensors by slot.

A fused projection (qkv, gate_up) is one site of several slices; an adapter may lack any of them, at any rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from loraplex.engine.lora.page_geometry import MAX_RANK, PAGE_RANKS

RANK, SCALES, A_PAGES = 0, 1, 2
"""Columns of an entry of `LoraSite.table`; the addresses of B's pages follow those of A's."""


class LoraPart(Protocol):
    """What the torch backend reads of an adapter's part of one slice; see `LoraSlice`."""

    @property
    def a(self) -> torch.Tensor: ...

    @property
    def b(self) -> torch.Tensor: ...

    @property
    def scales(self) -> torch.Tensor | None: ...

    @property
    def rank(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LoraSlice:
    """One adapter's part of one slice: A [rank, inputs], B [rank, slice outputs] (rank-major, scale folded in).

    Quantized ones have `scales` fp32 [rank]: delta = ((x A^T) * scales) B.
    """

    a: torch.Tensor
    b: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(slots=True)
class LoraSite:
    """`names` are the module names of its slices; `offsets` [slices + 1] their columns in the fused output.

    `table` [max_slots, slices, 2 + 2 pages] int64 for kernels that follow pointers: rank, address of the scales or 0,
    addresses of A's pages [PAGE_RANKS, inputs], addresses of B's pages [PAGE_RANKS, slice outputs]. On a CPU the pages
    of a matrix are contiguous. `page_dtype` None: pages are of the model's type, and there are no scales.
    """

    names: tuple[str, ...]
    inputs: int
    slice_sizes: tuple[int, ...]
    table: torch.Tensor
    offsets: torch.Tensor
    host_offsets: tuple[int, ...]
    page_dtype: torch.dtype | None = None
    slots: dict[int, Sequence[LoraPart | None]] = field(default_factory=dict)

    @property
    def outputs(self) -> int:
        return self.host_offsets[-1]

    @property
    def max_pages(self) -> int:
        """Pages of A, and of B, that an entry of `table` has room for."""
        return (self.table.shape[2] - A_PAGES) // 2


def empty_table(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return int64 zeros; on a CPU they take memory only where they are written, while `torch.zeros` takes it at once."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, dtype=np.int64))
    return torch.zeros(shape, dtype=torch.int64, device=device)


def make_site(
    names: tuple[str, ...],
    inputs: int,
    slice_sizes: tuple[int, ...],
    max_slots: int,
    device: torch.device,
    max_rank: int = MAX_RANK,
) -> LoraSite:
    """Return an empty site of `sum(slice_sizes)` outputs, for adapters of up to `max_rank`."""
    max_pages = -(-max_rank // PAGE_RANKS)
    offsets = [0]
    for size in slice_sizes:
        offsets.append(offsets[-1] + size)
    return LoraSite(
        names=names,
        inputs=inputs,
        slice_sizes=slice_sizes,
        table=empty_table((max_slots, len(names), A_PAGES + 2 * max_pages), device),
        offsets=torch.tensor(offsets, dtype=torch.int64, device=device),
        host_offsets=tuple(offsets),
    )
