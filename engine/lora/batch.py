"""`LoraBatch`: the rows of one step grouped by adapter slot, as a CSR list (Punica's segments).

Invariant: rows of the base model stand in no group, so no kernel can ever touch them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

LARGE_GROUP = 16
"""Groups above this many rows are matrix products of their own; below, bandwidth decides and groups are fused."""


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


@dataclass(frozen=True, slots=True)
class LoraBatch:
    """All groups; `small` and `large` partition them by size."""

    groups: LoraGroups
    small: LoraGroups | None
    large: LoraGroups | None


def group_rows(row_slots: Sequence[int], device: torch.device) -> LoraBatch | None:
    """Group rows by slot; -1 is the base model. None when no row has an adapter."""
    members: dict[int, list[int]] = {}
    for row, slot in enumerate(row_slots):
        if slot >= 0:
            members.setdefault(slot, []).append(row)
    if not members:
        return None
    ordered = sorted(members.items())
    small = [item for item in ordered if len(item[1]) <= LARGE_GROUP]
    large = [item for item in ordered if len(item[1]) > LARGE_GROUP]
    groups = _groups(ordered, device)
    return LoraBatch(
        groups=groups,
        small=groups if not large else _groups(small, device) if small else None,
        large=groups if not small else _groups(large, device) if large else None,
    )


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
