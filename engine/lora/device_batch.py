"""`DeviceLoraBatch`: rows grouped by adapter in the memory that a GPU's kernels read; the host has no copy.

Invariant: shapes and addresses are known before the slots are, so that a captured step serves every choice of adapters.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import torch

from loraplex.engine.lora.batch import LoraBatch
from loraplex.engine.lora.page_geometry import PAGE_RANKS, SPLIT_K
from loraplex.engine.lora.site import LoraSite

DECODE_ROWS = 16
"""Rows of a chunk at decode: the fewest a tensor core takes."""
PREFILL_ROWS = 32
"""Rows of a chunk at prefill: the most that compile to the tensor-core instruction proven for expand."""
FEW_ADAPTERS = 8
"""Up to this many adapters, their bytes are negligible next to the base weights, and kernels divide the work by rows."""


class LoraPath(Enum):
    """Which kernels compute the adapters of rows. One path for all rows of a step, chosen on the host."""

    FOLDED = auto()
    """Decodes of few adapters, in chunks: the kernel that reads a projection adds its adapters' part, see `PendingDelta`."""
    BY_ROW = auto()
    """Decodes of many adapters: every row by itself, without tensor cores, because few rows share an adapter."""
    MIXED = auto()
    """Decodes and prefill chunks alike, in chunks of more rows."""
    DETERMINISTIC = auto()
    """Every step, whatever its rows."""

    @property
    def chunk_rows(self) -> int:
        """Most rows of a chunk."""
        if self is LoraPath.BY_ROW:
            return 1
        return PREFILL_ROWS if self is LoraPath.MIXED else DECODE_ROWS

    @staticmethod
    def of(adapters: int, *, is_mixed: bool, deterministic: bool) -> "LoraPath":
        """Return the path of a step with so many distinct adapters; `is_mixed`: it has prefill chunks."""
        if deterministic:
            return LoraPath.DETERMINISTIC
        if is_mixed:
            return LoraPath.MIXED
        return LoraPath.FOLDED if adapters <= FEW_ADAPTERS else LoraPath.BY_ROW


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
    """The rows of one step. `chunks` None: each row is a chunk by itself, found at its own place in `row_slots`.

    `is_static`: the step may be replayed with other adapters, so every site acts whether or not it has any now.
    """

    row_slots: torch.Tensor
    path: LoraPath
    chunks: ChunkBuffers | None
    is_static: bool = False
    workspace: LoraWorkspace | None = None

    @property
    def num_rows(self) -> int:
        return self.row_slots.shape[0]

    @property
    def num_chunks(self) -> int:
        """Return the programs that the chunks take, with those that turn out empty."""
        return self.num_rows if self.chunks is None else self.chunks.slots.shape[0]

    @property
    def chunk_lists(self) -> tuple[torch.Tensor, ...]:
        """Return the chunks' `order, starts, ends, slots`, as kernels take them. Raises `ValueError` without chunks."""
        if self.chunks is None:
            raise ValueError(f"rows of the path {self.path.name} are not in chunks")
        return self.chunks.lists

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


def make_chunk_buffers(num_rows: int, adapters: int, path: LoraPath, device: torch.device) -> ChunkBuffers:
    """Allocate uninitialised buffers for all chunks that rows of at most `adapters` adapters can make."""
    num_chunks = chunk_bound(num_rows, adapters, path.chunk_rows)
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


def make_workspace(sites: Sequence[LoraSite], max_rows: int, device: torch.device) -> LoraWorkspace:
    """Allocate a workspace for steps of up to `max_rows` rows at any of `sites`."""
    # An embedding's hidden values are columns of A, not sums.
    projections = [site for site in sites if site.names != ("embed_tokens",)]
    elements = max(torch.Size(hidden_shape(site, max_rows)).numel() for site in projections)
    branch = SideStream(device) if device.type == "cuda" else InLine()
    return LoraWorkspace(torch.empty(elements, dtype=torch.float32, device=device), branch)
