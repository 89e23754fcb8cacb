"""Cutoffs of top-k and top-p in Triton: each row's is found by bisection over the bits of a float, without a sort.

Invariant: the bits of floats that are not negative are ordered as they are, so 30 counts find the k-th largest weight, and
30 sums the largest one above which the wanted mass lies: the numbers a sort would give, up to the rounding of its sums.
"""

import torch
import triton
import triton.language as tl

BLOCK = 8192
"""16 values per lane and load: 128k tokens take 16 turns, all of them from the second-level cache."""
NUM_WARPS = 16
ONE_BITS = tl.constexpr(0x3F800000)
"""The bits of 1.0, which no weight exceeds."""
BISECTIONS = tl.constexpr(30)


@triton.jit  # type: ignore[untyped-decorator]
def count_from(row, vocab, bits, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many weights have at least these bits."""
    counts = tl.zeros((block,), dtype=tl.int32)
    for start in range(0, vocab, block):
        tokens = start + tl.arange(0, block)
        weights = tl.load(row + tokens, mask=tokens < vocab, other=-1.0)
        counts += (weights.to(tl.int32, bitcast=True) >= bits).to(tl.int32)
    return tl.sum(counts, axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def mass_from(row, vocab, bits, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of the weights that have at least these bits: lanes in fp32, across them in fp64."""
    sums = tl.zeros((block,), dtype=tl.float32)
    for start in range(0, vocab, block):
        tokens = start + tl.arange(0, block)
        weights = tl.load(row + tokens, mask=tokens < vocab, other=-1.0)
        sums += tl.where(weights.to(tl.int32, bitcast=True) >= bits, weights, 0.0)
    return tl.sum(sums.to(tl.float64), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def cutoff_kernel(  # type: ignore[no-untyped-def]
    weights,  # [rows, vocab] fp32 in 0..1
    index,  # [ranked] int64
    top_k,  # [ranked] int64, 0: off
    top_p,  # [ranked] fp64, 1: off
    lowest,  # [rows] fp32, raised in place
    vocab,
    block: tl.constexpr,
) -> None:
    """One ranked row."""
    ranked = tl.program_id(0)
    place = tl.load(index + ranked).to(tl.int64)
    row = weights + place * vocab
    wanted_count = tl.load(top_k + ranked)
    share = tl.load(top_p + ranked)
    floor = tl.load(lowest + place).to(tl.int32, bitcast=True)
    if wanted_count > 0:
        low = floor * 0
        high = low + ONE_BITS
        for _ in range(BISECTIONS):
            middle = low + (high - low + 1) // 2
            is_enough = count_from(row, vocab, middle, block) >= wanted_count
            low = tl.where(is_enough, middle, low)
            high = tl.where(is_enough, high, middle - 1)
        floor = tl.maximum(floor, low)
    if share < 1.0:
        wanted_mass = share * mass_from(row, vocab, floor, block)
        low = floor
        high = tl.maximum(floor, floor * 0 + ONE_BITS)
        for _ in range(BISECTIONS):
            middle = low + (high - low + 1) // 2
            is_enough = mass_from(row, vocab, middle, block) >= wanted_mass
            low = tl.where(is_enough, middle, low)
            high = tl.where(is_enough, high, middle - 1)
        floor = low
    tl.store(lowest + place, floor.to(tl.float32, bitcast=True))


def raise_cutoffs(
    weights: torch.Tensor,
    lowest: torch.Tensor,
    index: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> None:
    """Raise `lowest` [rows, 1] in place for the rows `index` of `weights`, by their `top_k` and `top_p` [ranked, 1]."""
    cutoff_kernel[(index.shape[0],)](
        weights, index, top_k, top_p, lowest, weights.shape[1], block=BLOCK, num_warps=NUM_WARPS
    )
