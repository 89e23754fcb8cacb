"""`StaticInputs`: the buffers that a captured decode step reads, at addresses that never change.

Invariant: every row of the bucket is written before a replay. Rows beyond the step's own are padding: token 0 at position 0
of a block that no sequence uses, without an adapter. No code reads their results.
"""

from dataclasses import dataclass

import torch

from loraplex.engine.batch.forward_batch import BatchRows, ForwardBatch, UnknownTokens
from loraplex.engine.batch.host_transfers import HostTransfers
from loraplex.engine.lora.batch import LoraBatch


@dataclass(frozen=True, slots=True)
class StaticShape:
    """`rows` of the largest bucket, `columns` of the longest block table; padding writes to `scratch_block`."""

    rows: int
    columns: int
    block_size: int
    scratch_block: int


class StaticInputs:
    """Buffers filled in stream order, after any step that still reads them."""

    def __init__(
        self, shape: StaticShape, device: torch.device, transfers: HostTransfers | None = None
    ) -> None:
        self._shape = shape
        self._transfers = transfers or HostTransfers(device)
        rows = shape.rows
        self.token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.slots = torch.full(
            (rows,), shape.scratch_block * shape.block_size, dtype=torch.int64, device=device
        )
        self.tables = torch.full((rows, shape.columns), shape.scratch_block, dtype=torch.int32, device=device)
        self.lengths = torch.ones(rows, dtype=torch.int32, device=device)
        self.row_slots = torch.full((rows,), -1, dtype=torch.int32, device=device)

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        return self.token_ids, self.positions, self.slots, self.tables, self.lengths, self.row_slots

    def batch(self, bucket: int, lora: LoraBatch | None) -> ForwardBatch:
        """Return what a step of `bucket` rows reads."""
        return ForwardBatch(
            token_ids=self.token_ids[:bucket],
            positions=self.positions[:bucket],
            slots=self.slots[:bucket],
            num_decodes=bucket,
            decode_tables=self.tables[:bucket],
            decode_lengths=self.lengths[:bucket],
            chunks=None,
            sampled_tokens=None,
            num_sampled=bucket,
            lora=lora,
            sampled_lora=lora,
        )

    def fill(self, rows: BatchRows, bucket: int, unknown: UnknownTokens | None) -> None:
        """Write a decode step of at most `bucket` rows, in one transfer. Columns after a row's end keep their old values."""
        padding = bucket - len(rows.token_ids)
        scratch = self._shape.scratch_block
        width = max(len(table) for table in rows.decodes)
        tables = [table + (scratch,) * (width - len(table)) for table in rows.decodes]
        places, sources = rows.unknown_places(unknown)
        host = [
            torch.tensor(rows.token_ids + [0] * padding, dtype=torch.int64),
            torch.tensor(rows.positions + [0] * padding, dtype=torch.int64),
            torch.tensor(rows.slots + [scratch * self._shape.block_size] * padding, dtype=torch.int64),
            torch.tensor(tables + [(scratch,) * width] * padding, dtype=torch.int32),
            torch.tensor([p + 1 for p in rows.positions] + [1] * padding, dtype=torch.int32),
            torch.tensor(rows.row_slots + [-1] * padding, dtype=torch.int32),
            torch.tensor(places, dtype=torch.int64),
            torch.tensor(sources, dtype=torch.int64),
        ]
        *staged, at, source = self._transfers.stage(host)
        targets = [buffer[:bucket] for buffer in self.buffers]
        targets[3] = targets[3][:, :width]
        torch._foreach_copy_(targets, staged)
        if unknown is not None and places:
            self.token_ids.index_copy_(0, at, unknown.token_ids.index_select(0, source).clamp_min(0))
