"""Grammar bitmask, and cutoffs of top-k and top-p, in Triton. Cutoffs use bisection over the bits of a float, not a sort.

Invariant: the bits of non-negative floats are ordered like their values. So 30 counts find the k-th largest weight, and 30
sums find the largest weight above which the wanted mass lies: the result of a sort, up to the rounding of its sums.
"""

import torch
import triton
import triton.language as tl

from loraplex.engine.kernels.triton.launch_plans import launch_kernel

BLOCK_WORDS = 64
"""2,048 tokens per program: 63 programs for each row of a vocabulary of 128k, 8 KiB of fp32 logits each."""
BITMASK_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def bitmask_kernel(  # type: ignore[no-untyped-def]
    logits,  # [any, vocab]
    rows,  # [masked] int64
    bitmask,  # [masked, words] int32
    vocab,
    words,
    block_words: tl.constexpr,
) -> None:
    """Row `program_id(0)` of the bitmask, its words from `program_id(1) * block_words`."""
    masked = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * block_words + tl.arange(0, block_words)
    # Words beyond the row count as all ones: they forbid nothing.
    bits = tl.load(bitmask + masked * words + word, mask=word < words, other=-1)
    position = tl.arange(0, 32)
    token = word[:, None] * 32 + position[None, :]
    is_forbidden = ((bits[:, None] >> position[None, :]) & 1) == 0
    target = logits + tl.load(rows + masked) * vocab + token
    nothing = tl.full((block_words, 32), float("-inf"), dtype=logits.dtype.element_ty)
    tl.store(target, nothing, mask=is_forbidden & (token < vocab))


def apply_bitmask(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    """See `reference.apply_bitmask`."""
    masked, words = bitmask.shape
    launch_kernel(
        bitmask_kernel,
        (masked, triton.cdiv(words, BLOCK_WORDS)),
        logits,
        rows,
        bitmask,
        logits.shape[1],
        words,
        block_words=BLOCK_WORDS,
        num_warps=BITMASK_WARPS,
    )


CUTOFF_BLOCK = 8192
"""16 values per lane and load: 128k tokens take 16 iterations, all of them from the second-level cache."""
CUTOFF_WARPS = 16
ONE_BITS = tl.constexpr(0x3F800000)
"""The bits of 1.0, the largest possible weight."""
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
    launch_kernel(
        cutoff_kernel,
        (index.shape[0],),
        weights,
        index,
        top_k,
        top_p,
        lowest,
        weights.shape[1],
        block=CUTOFF_BLOCK,
        num_warps=CUTOFF_WARPS,
    )
