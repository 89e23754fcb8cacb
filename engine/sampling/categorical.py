"""Row-wise reductions over a vocabulary: the largest entry, and a draw by inverse CDF (Devroye 1986, III.2).

Invariant: a row's result depends on that row alone. Tokens are taken in id order, never in the order of a sort, so ties
cannot make the draw depend on the path; NaN stays in its row and still gives an index in range.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

_BLOCK = 256
_SMALLEST_BLOCK = 16


def row_maxima(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value of every row of `scores` [rows, vocab] and its lowest index. NaN wins over every number."""
    rows, vocab = scores.shape
    block = math.gcd(vocab, _BLOCK)
    if block < _SMALLEST_BLOCK:
        return scores.max(dim=-1)
    blocks = scores.view(rows, -1, block)
    # Reducing values is vectorised, reducing with indices is not: only the winning block needs indices.
    winner = blocks.amax(dim=-1).argmax(dim=-1)
    values, offsets = _pick_block(blocks, winner).max(dim=-1)
    return values, winner * block + offsets


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Token ids [rows] with probability proportional to `weights` float32 [rows, vocab], never one of weight 0.

    `uniforms` float64 [rows] in [0, 1). Blocks are summed in float32, everything across blocks in float64: a float32
    CDF over 150k tokens would lose the tail.
    """
    blocks = _blocks(weights)
    sums = blocks.sum(dim=-1).double()
    block, rest = _invert(sums, uniforms * sums.sum(dim=-1))
    offset, _ = _invert(_pick_block(blocks, block).double(), rest)
    return block * _BLOCK + offset


def total_mass(weights: Tensor) -> Tensor:
    """Sum every row of `weights` [rows, vocab], as float64 [rows, 1]."""
    return _blocks(weights).sum(dim=-1).double().sum(dim=-1, keepdim=True)


def keep_from(weights: Tensor, cutoff: Tensor) -> Tensor:
    """Set entries of `weights` [rows, vocab] below the row's cutoff [rows, 1] to 0."""
    # A float mask: on a CPU a product with a boolean one takes ten times as long.
    return torch.ge(weights, cutoff, out=torch.empty_like(weights)).mul_(weights)


def _blocks(weights: Tensor) -> Tensor:
    padding = -weights.shape[1] % _BLOCK
    padded = functional.pad(weights, (0, padding)) if padding else weights
    return padded.view(weights.shape[0], -1, _BLOCK)


def _pick_block(blocks: Tensor, index: Tensor) -> Tensor:
    return blocks[torch.arange(blocks.shape[0], device=blocks.device), index]


def _invert(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index [rows] whose cumulated float64 weight exceeds `target`, and the rest of the target there.

    The target is kept below the total, so the index always has positive weight.
    """
    cumulated = weights.cumsum(dim=-1)
    total = cumulated[:, -1]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total))).clamp_min(0.0)
    index = (cumulated <= target.unsqueeze(-1)).sum(dim=-1)
    before = (cumulated - weights).gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return index, (target - before).clamp_min(0.0)
