"""`DeviceLoraBatch`: rows grouped by adapter in the memory that a GPU's kernels read; the host has no copy.

Invariant: shapes and addresses are known before the slots are, so that a captured step serves every choice of adapters.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from loraplex.engine.lora.batch import LoraBatch
from loraplex.engine.lora.site import PAGE_RANKS, LoraSite

DECODE_ROWS = 16
"""Rows of a chunk at decode: the fewest a tensor core takes."""
PREFILL_ROWS = 32
"""Rows of a chunk at prefill: the most that compile to the tensor-core instruction proven for expand."""
FEW_ADAPTERS = 8
"""Up to this many adapters, their bytes are negligible next to the base weights, and kernels divide the work by rows."""
SPLIT_K = 1024
"""Inputs per shrink program: 32 KiB of A at rank 16, about 1 us at one SM's share of the bandwidth. Independent of the
batch."""


@dataclass(frozen=True, slots=True)
class ChunkBuffers:
    """int32. `order` [rows]: rows by slot, -1 last; chunk c is `order[starts[c] : ends[c]]`, all of `slots[c]`.

    Chunks of the base model and unused ones, which have no rows, have slot -1.
    """

    order: torch.Tensor
    places: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    slots: torch.Tensor

    @property
    def lists(self) -> tuple[torch.Tensor, ...]:
        """Return `order, starts, ends, slots`, as kernels take them."""
        return self.order, self.starts, self.ends, self.slots


class Branch(Protocol):
    """Where work runs that the current stream need not wait for at once."""

    def fork(self) -> AbstractContextManager[None]:
        """Context in which work goes to the branch, after everything queued on the current stream so far."""
        ...

    def join(self) -> None:
        """Make the current stream wait for the branch."""
        ...


class InLine:
    """No branch: work goes to the current stream."""

    def fork(self) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self) -> None:
        return


class SideStream:
    """A side stream, also while a graph is captured: two events order everything on it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._forked = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._joined = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @contextmanager
    def fork(self) -> Iterator[None]:
        self._forked.record(torch.cuda.current_stream(self._stream.device))
        self._stream.wait_event(self._forked)
        with torch.cuda.stream(self._stream):
            yield
            self._joined.record(self._stream)

    def join(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_event(self._joined)


@dataclass(frozen=True, slots=True)
class LoraWorkspace:
    """Buffers that the kernels of a step pass to one another, allocated once: memory allocated on a branch during capture
    may be reused too soon. One step at a time uses it; `branch` is where shrink runs.
    """

    hidden: torch.Tensor
    branch: Branch


@dataclass(frozen=True, slots=True)
class DeviceLoraBatch(LoraBatch):
    """The rows of one step. `by_row`: chunks have a row or two each and run on kernels without tensor cores.

    `is_folded`: the kernel that reads a projection adds its adapters' part, see `PendingDelta`. `is_static`: the step may
    be replayed with other adapters, so every site acts whether or not it has any now.
    """

    row_slots: torch.Tensor
    chunks: ChunkBuffers
    num_chunks: int
    chunk_rows: int
    by_row: bool = False
    is_folded: bool = False
    is_static: bool = False
    workspace: LoraWorkspace | None = None

    @property
    def num_rows(self) -> int:
        return self.row_slots.shape[0]

    def acts_at(self, site: LoraSite) -> bool:
        return self.is_static or bool(site.slots)


@dataclass(frozen=True, slots=True)
class PendingDelta:
    """The part still to be added to a projection's output: the hidden values from `shrink`, for the one kernel that reads
    them.
    """

    hidden: torch.Tensor
    site: LoraSite
    batch: DeviceLoraBatch


def chunk_bound(num_rows: int, adapters: int, chunk_rows: int) -> int:
    """Return the most chunks that rows of at most `adapters` adapters, and of the base model, can make."""
    groups = min(num_rows, adapters + 1)
    return groups + (num_rows - groups) // chunk_rows


def make_chunk_buffers(num_rows: int, num_chunks: int, device: torch.device) -> ChunkBuffers:
    """Allocate uninitialised buffers."""
    sizes = (num_rows, num_rows, num_chunks, num_chunks, num_chunks)
    return ChunkBuffers(*(torch.empty(size, dtype=torch.int32, device=device) for size in sizes))


def hidden_shape(site: LoraSite, num_rows: int) -> tuple[int, int, int, int]:
    """[splits, rows, slices, ranks] of the partial sums between shrink and expand."""
    return -(-site.inputs // SPLIT_K), num_rows, len(site.names), site.max_pages * PAGE_RANKS


def hidden_for(site: LoraSite, batch: DeviceLoraBatch) -> torch.Tensor:
    """Return memory of `hidden_shape`, from the workspace if there is one."""
    shape = hidden_shape(site, batch.num_rows)
    if batch.workspace is None:
        return torch.empty(shape, dtype=torch.float32, device=batch.row_slots.device)
    return batch.workspace.hidden[: torch.Size(shape).numel()].view(shape)


def make_workspace(
    sites: Sequence[LoraSite], max_rows: int, device: torch.device, *, is_forking: bool = True
) -> LoraWorkspace:
    """Allocate a workspace for steps of up to `max_rows` rows at any of `sites`."""
    # An embedding's hidden values are columns of A, not sums.
    projections = [site for site in sites if site.names != ("embed_tokens",)]
    elements = max(torch.Size(hidden_shape(site, max_rows)).numel() for site in projections)
    branch = SideStream(device) if device.type == "cuda" and is_forking else InLine()
    return LoraWorkspace(torch.empty(elements, dtype=torch.float32, device=device), branch)
