"""Cutoffs of min-p (Nguyen et al. 2024), top-k and top-p (Holtzman et al. 2020), applied in this order.

Invariant: a filter is one number per row, the lowest weight it keeps; tokens tied with it are kept too. The number
is exact: a short `topk` decides most rows, the others are sorted whole, and both give the same number.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loraplex.engine.categorical import keep_from, total_mass

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


def truncate(weights: Tensor, truncations: list[Truncation]) -> Tensor:
    """`weights` float32 [rows, vocab], relative to the row's largest (1), with 0 for what a filter drops."""
    if not any(t.needs_ranking or t.min_p > 0.0 for t in truncations):
        return weights
    floors = [t.min_p for t in truncations]
    lowest = torch.tensor(floors, dtype=weights.dtype, device=weights.device).unsqueeze(-1)
    ranked = [row for row, t in enumerate(truncations) if t.needs_ranking]
    if ranked:
        _rank(weights, truncations, ranked, lowest)
    return keep_from(weights, lowest)


def _rank(weights: Tensor, truncations: list[Truncation], rows: list[int], lowest: Tensor) -> None:
    """Raise `lowest` [rows of weights, 1] in place for `rows`, first by the top of the ranking, then by all of it."""
    vocab = weights.shape[1]
    for width in (min(_PREFILTER, vocab), vocab):
        index = torch.tensor(rows, device=weights.device)
        chosen = weights if len(rows) == weights.shape[0] else weights.index_select(0, index)
        ranking = chosen.topk(width).values if width < vocab else _sort_descending(chosen)
        found, decided = _cut(chosen, ranking, [truncations[row] for row in rows], lowest[index])
        lowest[index] = torch.where(decided, found, lowest[index])
        rows = [row for row, done in zip(rows, decided.flatten().tolist(), strict=True) if not done]
        if not rows:
            return


def _sort_descending(weights: Tensor) -> Tensor:
    if weights.device.type == "cpu":
        # NumPy's vectorised sort is four times as fast as torch's on a CPU.
        return torch.from_numpy(np.sort(weights.numpy(), axis=-1)).flip(-1)
    return weights.sort(dim=-1, descending=True).values


def _cut(
    weights: Tensor, ranking: Tensor, truncations: list[Truncation], lowest: Tensor
) -> tuple[Tensor, Tensor]:
    """Cutoffs [rows, 1], and whether `ranking` (the largest weights, descending) was long enough to decide them."""
    width, complete = ranking.shape[1], ranking.shape[1] == weights.shape[1]
    top_k = torch.tensor([t.top_k for t in truncations], device=weights.device).unsqueeze(-1)
    decided = (top_k <= width) | complete
    by_rank = ranking.gather(-1, (top_k - 1).clamp(0, width - 1))
    lowest = torch.where(top_k > 0, torch.maximum(lowest, by_rank), lowest)
    if all(t.top_p >= 1.0 for t in truncations):
        return lowest, decided
    filtered = any(t.top_k > 0 or t.min_p > 0.0 for t in truncations)
    wanted = _shares(truncations, weights.device) * total_mass(
        keep_from(weights, lowest) if filtered else weights
    )
    mass = keep_from(ranking, lowest).cumsum(dim=-1, dtype=torch.float64)
    rank = (mass < wanted).sum(dim=-1, keepdim=True)
    nucleus = torch.tensor([t.top_p < 1.0 for t in truncations], device=weights.device).unsqueeze(-1)
    decided = decided & (~nucleus | (rank < width) | complete)
    by_mass = ranking.gather(-1, rank.clamp_max(width - 1))
    return torch.where(nucleus, torch.maximum(lowest, by_mass), lowest), decided


def _shares(truncations: list[Truncation], device: torch.device) -> Tensor:
    """top_p as float64 [rows, 1]."""
    return torch.tensor([t.top_p for t in truncations], dtype=torch.float64, device=device).unsqueeze(-1)
