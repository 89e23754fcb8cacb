"""SGMV in torch: one pair of products per group and slice. The specification of every other backend."""

import torch
import torch.nn.functional as F

from loraplex.engine.lora.batch import GROUP_ROWS, LoraGroups
from loraplex.engine.lora.site import LoraPart, LoraSite


def sgmv(x: torch.Tensor, y: torch.Tensor, site: LoraSite, groups: LoraGroups) -> None:
    """y[rows of g] += ((x[rows of g] @ A_g.T) * scales_g) @ B_g per slice, in place. x [rows, inputs], y [rows, outputs]."""
    for index, slot in enumerate(groups.host_slots):
        rows = groups.order[groups.host_starts[index] : groups.host_starts[index + 1]]
        selected = padded_group(x.index_select(0, rows))
        for s, part in enumerate(site.slots.get(slot, ())):
            if part is None:
                continue
            delta = _delta(selected, part)[: len(rows)]
            columns = y[:, site.host_offsets[s] : site.host_offsets[s + 1]]
            columns.index_add_(0, rows, delta)


def padded_group(x: torch.Tensor) -> torch.Tensor:
    """Return x [rows, inputs] with rows of zeros up to a multiple of `GROUP_ROWS`: libraries sum few rows in another order."""
    return F.pad(x, (0, 0, 0, -len(x) % GROUP_ROWS))


def _delta(x: torch.Tensor, part: LoraPart) -> torch.Tensor:
    if part.scales is None:
        return F.linear(x, part.a) @ part.b
    hidden = F.linear(x.float(), part.a.float()) * part.scales
    return (hidden @ part.b.float()).to(x.dtype)
