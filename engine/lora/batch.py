"""`LoraBatch`: the rows of one step grouped by adapter slot, as a CSR list (Punica's segments), here for a CPU.

Invariant: rows of the base model stand in no group, so no kernel can ever touch them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loraplex.engine.lora.site import LoraSite

GROUP_ROWS = 16
"""Most rows of a decode group. An adapter with more rows has several groups; all but the first read it from cache."""


@dataclass(frozen=True, slots=True)
class LoraGroups:
    """`order[starts[g] : starts[g + 1]]` are the row indices of the group whose adapter is in `slots[g]`."""

    order: torch.Tensor
    starts: torch.Tensor
    slots: torch.Tensor
    host_starts: tuple[int, ...]
    host_slots: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return self.host_starts[-1]


class LoraBatch:
    """Which rows of a step have which adapter: a `HostLoraBatch` on a CPU, a `DeviceLoraBatch` where Triton runs."""

    __slots__ = ()

    def acts_at(self, site: LoraSite) -> bool:
        """Whether any row may have an adapter with a part at `site`."""
        return bool(site.slots)


@dataclass(frozen=True, slots=True)
class HostLoraBatch(LoraBatch):
    """All groups; `decodes` and `chunks` divide them by the kind of their rows, never by how many rows share an adapter.

    The kernels of the two may round differently, so a row's kernel must not depend on the other rows.
    """

    groups: LoraGroups
    decodes: LoraGroups | None
    chunks: LoraGroups | None


def group_rows(
    row_slots: Sequence[int], device: torch.device, num_decodes: int | None = None
) -> HostLoraBatch | None:
    """Group rows by slot; -1 is the base model. Rows from `num_decodes` on belong to prefill chunks.

    None when no row has an adapter.
    """
    split = len(row_slots) if num_decodes is None else num_decodes
    decodes = _members(row_slots, 0, split, GROUP_ROWS)
    chunks = _members(row_slots, split, len(row_slots), len(row_slots))
    if not decodes and not chunks:
        return None
    groups = _groups(decodes + chunks, device)
    return HostLoraBatch(
        groups=groups,
        decodes=groups if not chunks else _groups(decodes, device) if decodes else None,
        chunks=groups if not decodes else _groups(chunks, device) if chunks else None,
    )


def _members(row_slots: Sequence[int], begin: int, end: int, most: int) -> list[tuple[int, list[int]]]:
    """Yield (slot, rows) of rows `begin ... end - 1`, by slot, at most `most` rows each."""
    members: dict[int, list[int]] = {}
    for row in range(begin, end):
        if row_slots[row] >= 0:
            members.setdefault(row_slots[row], []).append(row)
    return [
        (slot, rows[i : i + most])
        for slot, rows in sorted(members.items())
        for i in range(0, len(rows), most)
    ]


def _groups(members: Sequence[tuple[int, Sequence[int]]], device: torch.device) -> LoraGroups:
    order: list[int] = []
    starts = [0]
    for _, rows in members:
        order.extend(rows)
        starts.append(len(order))
    slots = [slot for slot, _ in members]
    return LoraGroups(
        order=torch.tensor(order, dtype=torch.int32, device=device),
        starts=torch.tensor(starts, dtype=torch.int32, device=device),
        slots=torch.tensor(slots, dtype=torch.int32, device=device),
        host_starts=tuple(starts),
        host_slots=tuple(slots),
    )
