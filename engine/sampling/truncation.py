"""Cutoffs of min-p (Nguyen et al. 2024), top-k and top-p (Holtzman et al. 2020), applied in this order.

Invariant: a filter is one number per row, the lowest weight that it keeps; tokens tied with it are kept too. The number is
exact: a short `topk` decides most rows, the others are sorted whole, and both give the same number; on CUDA bisection finds
it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from loraplex.engine.kernels.dispatch import KernelBackend, backend_for
from loraplex.engine.sampling.categorical import keep_from, total_mass

_PREFILTER = 128


@dataclass(frozen=True, slots=True)
class Truncation:
    """Filters of one row. `top_k` 0, `top_p` 1 and `min_p` 0 are off."""

    top_k: int
    top_p: float
    min_p: float

    @property
    def needs_ranking(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0


@dataclass(frozen=True, slots=True)
class Truncations:
    """Filters of a batch's rows. `tensors`, on the host or on the device where the weights are, are:

    lowest float32 [rows, 1], the min-p; and of the rows that need a ranking: their index int64 [ranked], top-k int64
    [ranked, 1], top-p float64 [ranked, 1].
    """

    tensors: tuple[Tensor, ...]
    num_ranked: int
    has_floor: bool
    has_top_p: bool
    is_filtered: bool
    """Whether a row is cut by top-k or min-p before its top-p applies."""

    @classmethod
    def of(cls, rows: Sequence[Truncation]) -> "Truncations":
        """Build the filters on the host."""
        ranked = [row for row in rows if row.needs_ranking]
        return cls(
            (
                torch.tensor([row.min_p for row in rows], dtype=torch.float32).unsqueeze(-1),
                torch.tensor([i for i, row in enumerate(rows) if row.needs_ranking], dtype=torch.int64),
                torch.tensor([row.top_k for row in ranked], dtype=torch.int64).unsqueeze(-1),
                torch.tensor([row.top_p for row in ranked], dtype=torch.float64).unsqueeze(-1),
            ),
            num_ranked=len(ranked),
            has_floor=any(row.min_p > 0.0 for row in rows),
            has_top_p=any(row.top_p < 1.0 for row in rows),
            is_filtered=any(row.top_k > 0 or row.min_p > 0.0 for row in ranked),
        )

    def at(self, tensors: tuple[Tensor, ...]) -> "Truncations":
        """Return the same filters with their tensors on another device."""
        return replace(self, tensors=tensors)

    @property
    def is_off(self) -> bool:
        return not self.num_ranked and not self.has_floor


def truncate(weights: Tensor, truncations: Truncations) -> Tensor:
    """Set `weights` float32 [rows, vocab], relative to the row's largest (1), to 0 where a filter drops them."""
    if truncations.is_off:
        return weights
    lowest = truncations.tensors[0]
    if truncations.num_ranked:
        lowest = lowest.clone()
        _rank(weights, truncations, lowest)
    return keep_from(weights, lowest)


def _rank(weights: Tensor, truncations: Truncations, lowest: Tensor) -> None:
    """Raise `lowest` [rows of weights, 1] in place for the rows that need a ranking.

    On a CPU the top of the ranking decides most rows. Elsewhere that is not checked, because the check would wait for the
    device.
    """
    _, index, *filters = truncations.tensors
    if backend_for(weights) is KernelBackend.TRITON:
        from loraplex.engine.kernels.triton.logit_masks import raise_cutoffs

        raise_cutoffs(weights, lowest, index, *filters)
        return
    vocab = weights.shape[1]
    chosen = weights if truncations.num_ranked == weights.shape[0] else weights.index_select(0, index)
    filters.append(lowest.index_select(0, index))
    if weights.device.type != "cpu" or vocab <= _PREFILTER:
        lowest.index_copy_(0, index, _cut(chosen, _sort_descending(chosen), truncations, *filters)[0])
        return
    found, decided = _cut(chosen, chosen.topk(_PREFILTER).values, truncations, *filters)
    lowest.index_copy_(0, index, found)
    undecided = (~decided).flatten().nonzero().flatten()
    if undecided.numel():
        chosen, *filters = (tensor[undecided] for tensor in (chosen, *filters))
        found, _ = _cut(chosen, _sort_descending(chosen), truncations, *filters)
        lowest.index_copy_(0, index[undecided], found)


def _sort_descending(weights: Tensor) -> Tensor:
    if weights.device.type == "cpu":
        # NumPy's vectorised sort is four times as fast as torch's on a CPU.
        return torch.from_numpy(np.sort(weights.numpy(), axis=-1)).flip(-1)
    return weights.sort(dim=-1, descending=True).values


def _cut(
    weights: Tensor, ranking: Tensor, truncations: Truncations, top_k: Tensor, top_p: Tensor, lowest: Tensor
) -> tuple[Tensor, Tensor]:
    """Cutoffs [rows, 1], and whether `ranking` (the largest weights, descending) was long enough to decide them."""
    width, complete = ranking.shape[1], ranking.shape[1] == weights.shape[1]
    decided = (top_k <= width) | complete
    by_rank = ranking.gather(-1, (top_k - 1).clamp(0, width - 1))
    lowest = torch.where(top_k > 0, torch.maximum(lowest, by_rank), lowest)
    if not truncations.has_top_p:
        return lowest, decided
    wanted = top_p * total_mass(keep_from(weights, lowest) if truncations.is_filtered else weights)
    mass = keep_from(ranking, lowest).cumsum(dim=-1, dtype=torch.float64)
    rank = (mass < wanted).sum(dim=-1, keepdim=True)
    nucleus = top_p < 1.0
    decided = decided & (~nucleus | (rank < width) | complete)
    by_mass = ranking.gather(-1, rank.clamp_max(width - 1))
    return torch.where(nucleus, torch.maximum(lowest, by_mass), lowest), decided
