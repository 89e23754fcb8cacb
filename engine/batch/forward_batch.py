"""`ForwardBatch`: a step plan as tensors, with everything that the model's forward pass reads and no global state."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from loraplex.engine.batch.host_transfers import HostTransfers
from loraplex.engine.batch.sequence import Sequence
from loraplex.engine.batch.step_plan import UNKNOWN_TOKEN, PlannedRow, StepPlan
from loraplex.engine.kernels.group_rows import group_rows
from loraplex.engine.kernels.prefill_chunks import PrefillChunks, tiles_of
from loraplex.engine.lora.batch import LoraBatch
from loraplex.engine.lora.device_batch import LoraWorkspace
from loraplex.engine.messages import AdapterKey
from loraplex.engine.sequence_scores import ScoredPosition


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Tokens of all rows one after another, decodes first. T tokens, D decodes, S sampled rows.

    token_ids, positions, slots int64 [T]; decode_tables int32 [D, columns]; decode_lengths int32 [D];
    sampled_tokens int64 [S]: index of each sampled row's last token, None when every token is sampled.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    num_decodes: int
    decode_tables: torch.Tensor
    decode_lengths: torch.Tensor
    chunks: PrefillChunks | None
    sampled_tokens: torch.Tensor | None
    num_sampled: int
    lora: LoraBatch | None
    sampled_lora: LoraBatch | None


@dataclass(frozen=True, slots=True)
class AdapterPath:
    """How the adapters of a step are computed. Kernels have a workspace for steps of up to `workspace_rows`. With
    `deterministic` there is one path for every batch.
    """

    deterministic: bool = False
    workspace: LoraWorkspace | None = None
    workspace_rows: int = 0

    def group(
        self,
        row_slots: list[int],
        device: torch.device,
        num_decodes: int,
        of_step: list[int] | None = None,
    ) -> LoraBatch | None:
        """Group the rows by slot; rows from `num_decodes` on belong to chunks. None when no row has an adapter.

        `of_step`: the slots of all rows of the step, if these are some of them.
        """
        return group_rows(
            row_slots,
            device,
            None if self.deterministic else num_decodes,
            of_step=of_step,
            workspace=self.workspace if len(row_slots) <= self.workspace_rows else None,
            deterministic=self.deterministic,
        )


@dataclass(frozen=True, slots=True)
class UnknownTokens:
    """Tokens of the previous step that only the device knows: `token_ids` int64 [rows], `rows` by sequence."""

    rows: Mapping[Sequence, int]
    token_ids: torch.Tensor


class BatchRows:
    """The rows of a plan one after another, as lists on the host from which tensors are made.

    Tokens of a response decode, each on its own, unless there are many; every other row is a chunk. So the path of a token
    depends neither on the prefix cache nor on the step's other rows, nor on whether a grammar forced the token together
    with others: K and V of all are written before any of them attends. `scored`: (place, sequence, position) of each token
    whose successor is scored.
    """

    def __init__(self, plan: StepPlan, block_size: int, adapter_slots: Mapping[AdapterKey, int]) -> None:
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.row_slots: list[int] = []
        self.sampled: list[int] = []
        self.sampled_slots: list[int] = []
        self.decodes: list[tuple[int, ...]] = []
        self.chunks: list[tuple[int, int, int, tuple[int, ...]]] = []
        self.unknown: list[tuple[int, Sequence]] = []
        self.scored: list[tuple[int, Sequence, ScoredPosition]] = []
        self._block_size = block_size
        for row in plan.rows:
            self._add(row, -1 if row.adapter is None else adapter_slots[row.adapter.key])

    def unknown_places(self, tokens: UnknownTokens | None) -> tuple[list[int], list[int]]:
        """Return the places of the unknown tokens here and in `tokens`. Raises `ValueError` without `tokens`."""
        if not self.unknown:
            return [], []
        if tokens is None:
            raise ValueError("the plan has unknown tokens, and there is no step before it")
        return [place for place, _ in self.unknown], [tokens.rows[sequence] for _, sequence in self.unknown]

    def batch(
        self,
        device: torch.device,
        transfers: HostTransfers,
        unknown: UnknownTokens | None = None,
        adapters: AdapterPath = AdapterPath(),
    ) -> ForwardBatch:
        """Copy the tensors to the device in one transfer."""
        token_ids, positions, slots, tables, lengths, sampled, at, source, *chunks = transfers.stage(
            [*self._tensors(unknown), *self._chunk_tensors()]
        )
        if unknown is not None and self.unknown:
            # A row that got no token is not used any more: it may compute any token.
            token_ids = token_ids.index_copy(0, at, unknown.token_ids.index_select(0, source).clamp_min(0))
        every = len(self.sampled) == len(self.token_ids)
        lora = adapters.group(self.row_slots, device, len(self.decodes))
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            num_decodes=len(self.decodes),
            decode_tables=tables,
            decode_lengths=lengths,
            chunks=PrefillChunks(*chunks) if chunks else None,
            sampled_tokens=None if every else sampled,
            num_sampled=len(self.sampled),
            lora=lora,
            sampled_lora=lora
            if every and not self.chunks
            else adapters.group(self.sampled_slots, device, len(self.sampled_slots), self.row_slots),
        )

    def _tensors(self, unknown: UnknownTokens | None) -> list[torch.Tensor]:
        """Return token ids, positions, slots, block tables and lengths of the decodes, sampled tokens, and the places of
        the unknown tokens here and in the previous step.
        """
        count = len(self.decodes)
        places, sources = self.unknown_places(unknown)
        return [
            torch.tensor(self.token_ids, dtype=torch.int64),
            torch.tensor(self.positions, dtype=torch.int64),
            torch.tensor(self.slots, dtype=torch.int64),
            _padded_tables(self.decodes),
            torch.tensor([p + 1 for p in self.positions[:count]], dtype=torch.int32),
            torch.tensor(self.sampled, dtype=torch.int64),
            torch.tensor(places, dtype=torch.int64),
            torch.tensor(sources, dtype=torch.int64),
        ]

    def _chunk_tensors(self) -> list[torch.Tensor]:
        """Return the fields of `PrefillChunks` in their order; nothing without chunks."""
        if not self.chunks:
            return []
        begins, ends, lengths, tables = zip(*self.chunks, strict=True)
        tensors = [torch.tensor(column, dtype=torch.int32) for column in (begins, ends, lengths)]
        tiles = [torch.tensor(column, dtype=torch.int32) for column in tiles_of(begins, ends)]
        return [*tensors, _padded_tables(tables), *tiles]

    def _add(self, row: PlannedRow, adapter_slot: int) -> None:
        start, count, table = row.start, len(row.token_ids), row.block_table
        begin, block_size = len(self.positions), self._block_size
        self.token_ids += row.token_ids
        self.row_slots += [adapter_slot] * count
        if count == 1:
            self.positions.append(start)
            self.slots.append(table[start // block_size] * block_size + start % block_size)
            if row.token_ids[0] == UNKNOWN_TOKEN:
                self.unknown.append((begin, row.sequence))
        else:
            places = range(start, start + count)
            self.positions += places
            self.slots += [table[p // block_size] * block_size + p % block_size for p in places]
        if row.decodes and not self.chunks:
            self.decodes += [table] * count
        else:
            self.chunks.append((begin, begin + count, start + count, table))
        for target in row.scores:
            self.scored.append((begin + target.position - start, row.sequence, target))
        if row.samples:
            self.sampled.append(len(self.positions) - 1)
            self.sampled_slots.append(adapter_slot)


def _padded_tables(tables: Iterable[tuple[int, ...]]) -> torch.Tensor:
    """Return int32 [tables, columns of the longest], filled up with block 0."""
    rows = list(tables)
    columns = max((len(table) for table in rows), default=0)
    padded = [table + (0,) * (columns - len(table)) for table in rows]
    return torch.tensor(padded, dtype=torch.int32).view(len(rows), columns)
