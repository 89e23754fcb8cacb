"""`StaticInputs`: the buffers that a captured step reads, at addresses that never change.

Invariant: everything that a step of a shape reads is written before its replay. Rows beyond the step's own are padding:
token 0 at position 0 of a block that no sequence uses, without an adapter, neither a decode nor of a chunk. No code reads
their results.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from loraplex.engine.batch.forward_batch import BatchRows, ForwardBatch, UnknownTokens
from loraplex.engine.batch.host_transfers import HostTransfers
from loraplex.engine.kernels.prefill_chunks import PrefillChunks, tile_bound, tiles_of
from loraplex.engine.lora.batch import LoraBatch
from loraplex.engine.runner.cuda_graphs.buckets import Buckets, StepShape

Written: TypeAlias = tuple[Tensor, Tensor]
"""A part of a buffer, and its new values on the host."""


@dataclass(frozen=True, slots=True)
class StaticBlocks:
    """Block tables have `columns`; padding writes to `scratch_block`."""

    columns: int
    block_size: int
    scratch_block: int


class StaticInputs:
    """Buffers filled in stream order, after any step that still reads them."""

    def __init__(
        self,
        buckets: Buckets,
        blocks: StaticBlocks,
        device: torch.device,
        transfers: HostTransfers | None = None,
    ) -> None:
        self._blocks = blocks
        self._device = device
        self._transfers = transfers or HostTransfers(device)
        tokens, rows, decodes = buckets.most, buckets.rows, buckets.most_decodes
        self.token_ids = self._zeros(tokens, dtype=torch.int64)
        self.positions = self._zeros(tokens, dtype=torch.int64)
        self.slots = self._zeros(tokens, dtype=torch.int64).fill_(blocks.scratch_block * blocks.block_size)
        self.row_slots = self._zeros(tokens).fill_(-1)
        self.tables = self._zeros(decodes, blocks.columns)
        self.lengths = self._zeros(decodes)
        self.sampled = self._zeros(rows, dtype=torch.int64)
        self.chunks = PrefillChunks(
            begins=self._zeros(rows),
            ends=self._zeros(rows),
            lengths=self._zeros(rows),
            tables=self._zeros(rows, blocks.columns),
            tile_chunks=self._zeros(tile_bound(tokens, rows)).fill_(-1),
            tile_begins=self._zeros(tile_bound(tokens, rows)),
        )

    def batch(self, shape: StepShape, lora: LoraBatch | None, sampled_lora: LoraBatch | None) -> ForwardBatch:
        """Return what a step of this shape reads."""
        return ForwardBatch(
            token_ids=self.token_ids[: shape.tokens],
            positions=self.positions[: shape.tokens],
            slots=self.slots[: shape.tokens],
            num_decodes=shape.decodes,
            decode_tables=self.tables[: shape.decodes],
            decode_lengths=self.lengths[: shape.decodes],
            chunks=self._chunks_of(shape) if shape.chunks else None,
            sampled_tokens=None if shape.samples is None else self.sampled[: shape.samples],
            num_sampled=shape.logits,
            lora=lora,
            sampled_lora=sampled_lora,
        )

    def fill(self, rows: BatchRows, shape: StepShape, unknown: UnknownTokens | None) -> Tensor:
        """Write a step that fits `shape`, in one transfer. Tables keep their old values where no row reads them.

        Returns int64 [sampled]: the tokens that are sampled, on the device.
        """
        places, sources = rows.unknown_places(unknown)
        written = [*self._written_tokens(rows, shape), *self._written_decodes(rows, shape)]
        if shape.chunks:
            written += self._written_chunks(rows, shape)
        lists = _int64(rows.sampled), _int64(places), _int64(sources)
        *staged, sampled, at, source = self._transfers.stage([*(values for _, values in written), *lists])
        _copy_all([target for target, _ in written], staged)
        if unknown is not None and places:
            self.token_ids.index_copy_(0, at, unknown.token_ids.index_select(0, source).clamp_min(0))
        return sampled

    def _written_tokens(self, rows: BatchRows, shape: StepShape) -> Iterable[Written]:
        tokens = shape.tokens
        scratch = self._blocks.scratch_block * self._blocks.block_size
        yield self.token_ids[:tokens], _int64(_padded(rows.token_ids, tokens, 0))
        yield self.positions[:tokens], _int64(_padded(rows.positions, tokens, 0))
        yield self.slots[:tokens], _int64(_padded(rows.slots, tokens, scratch))
        yield self.row_slots[:tokens], _int32(_padded(rows.row_slots, tokens, -1))
        if shape.samples is not None:
            yield self.sampled[: shape.samples], _int64(_padded(rows.sampled, shape.samples, 0))

    def _written_decodes(self, rows: BatchRows, shape: StepShape) -> Iterable[Written]:
        lengths = [position + 1 for position in rows.positions[: len(rows.decodes)]]
        yield self.lengths[: shape.decodes], _int32(_padded(lengths, shape.decodes, 0))
        if rows.decodes:
            yield _written_tables(self.tables, rows.decodes)

    def _written_chunks(self, rows: BatchRows, shape: StepShape) -> Iterable[Written]:
        chunks = self._chunks_of(shape)
        begins = [begin for begin, _, _, _ in rows.chunks]
        ends = [end for _, end, _, _ in rows.chunks]
        lengths = [length for _, _, length, _ in rows.chunks]
        tile_chunks, tile_begins = tiles_of(begins, ends)
        tiles = len(chunks.tile_chunks)
        yield chunks.begins, _int32(_padded(begins, shape.chunks, 0))
        yield chunks.ends, _int32(_padded(ends, shape.chunks, 0))
        yield chunks.lengths, _int32(_padded(lengths, shape.chunks, 0))
        yield chunks.tile_chunks, _int32(_padded(tile_chunks, tiles, -1))
        yield chunks.tile_begins, _int32(_padded(tile_begins, tiles, 0))
        if rows.chunks:
            yield _written_tables(chunks.tables, [chunk[3] for chunk in rows.chunks])

    def _chunks_of(self, shape: StepShape) -> PrefillChunks:
        chunks, tiles = self.chunks, tile_bound(shape.tokens, shape.chunks)
        return PrefillChunks(
            begins=chunks.begins[: shape.chunks],
            ends=chunks.ends[: shape.chunks],
            lengths=chunks.lengths[: shape.chunks],
            tables=chunks.tables[: shape.chunks],
            tile_chunks=chunks.tile_chunks[:tiles],
            tile_begins=chunks.tile_begins[:tiles],
        )

    def _zeros(self, *size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(*size, dtype=dtype, device=self._device)


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy in one launch for each type, and one for each target with gaps between its rows."""
    pairs = [*zip(targets, sources, strict=True)]
    for dtype in (torch.int64, torch.int32):
        dense = [pair for pair in pairs if pair[0].dtype is dtype and pair[0].is_contiguous()]
        torch._foreach_copy_([target for target, _ in dense], [source for _, source in dense])
    for target, source in pairs:
        if not target.is_contiguous():
            target.copy_(source)


def _written_tables(buffer: Tensor, tables: Sequence[tuple[int, ...]]) -> Written:
    """Return the columns that the longest table needs; shorter ones are filled up with a block that is not read."""
    width = max(len(table) for table in tables)
    return buffer[: len(tables), :width], _int32([_padded(table, width, 0) for table in tables])


def _padded(values: Sequence[int], size: int, filler: int) -> list[int]:
    return [*values, *[filler] * (size - len(values))]


def _int32(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _int64(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
