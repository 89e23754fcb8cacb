"""`ForwardBatch`: a step plan as tensors. Everything the model's forward pass reads, and nothing global."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from loraplex.engine.lora.batch import LoraBatch, group_rows
from loraplex.engine.plan import StepPlan


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Rows `begin:end` of the batch are the last `end - begin` of `length` tokens of one sequence."""

    begin: int
    end: int
    length: int
    block_table: torch.Tensor


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
    chunks: tuple[PrefillChunk, ...]
    sampled_tokens: torch.Tensor | None
    num_sampled: int
    lora: LoraBatch | None
    sampled_lora: LoraBatch | None


def make_forward_batch(
    plan: StepPlan, block_size: int, adapter_slots: Mapping[tuple[bytes, str], int], device: torch.device
) -> ForwardBatch:
    """Tensors of `plan`. Tokens of an answer decode, each on its own, unless there are many; every other row is a chunk.

    So a token takes the same path whatever the prefix cache and the step's other rows left of its prompt, and whether a
    grammar forced it along with others: K and V of all are written before any of them attends.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    row_slots: list[int] = []
    sampled: list[int] = []
    sampled_slots: list[int] = []
    decodes: list[tuple[int, ...]] = []
    chunks: list[PrefillChunk] = []
    for row in plan.rows:
        start, count, table = row.start, len(row.token_ids), row.block_table
        begin = len(positions)
        slot = -1 if row.adapter is None else adapter_slots[row.adapter.key]
        token_ids += row.token_ids
        row_slots += [slot] * count
        if count == 1:
            positions.append(start)
            slots.append(table[start // block_size] * block_size + start % block_size)
        else:
            places = range(start, start + count)
            positions += places
            slots += [table[p // block_size] * block_size + p % block_size for p in places]
        if row.decodes and not chunks:
            decodes += [table] * count
        else:
            table_tensor = torch.tensor(table, dtype=torch.int32, device=device)
            chunks.append(PrefillChunk(begin, begin + count, start + count, table_tensor))
        if row.samples:
            sampled.append(len(positions) - 1)
            sampled_slots.append(slot)
    every = len(sampled) == len(token_ids)
    lora = group_rows(row_slots, device, len(decodes))
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, device=device),
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        num_decodes=len(decodes),
        decode_tables=_decode_tables(decodes, device),
        decode_lengths=torch.tensor(
            [p + 1 for p in positions[: len(decodes)]], dtype=torch.int32, device=device
        ),
        chunks=tuple(chunks),
        sampled_tokens=None if every else torch.tensor(sampled, dtype=torch.int64, device=device),
        num_sampled=len(sampled),
        lora=lora,
        sampled_lora=lora if every and not chunks else group_rows(sampled_slots, device),
    )


def _decode_tables(decodes: list[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    columns = max((len(table) for table in decodes), default=0)
    padded = [table + (0,) * (columns - len(table)) for table in decodes]
    return torch.tensor(padded, dtype=torch.int32, device=device).view(len(decodes), columns)
