"""The bitmask of a grammar in Triton: one program per row and `BLOCK_WORDS` words; only what is forbidden is written."""

import torch
import triton
import triton.language as tl

BLOCK_WORDS = 64
"""2,048 tokens per program: 63 programs for each row of a vocabulary of 128k, 8 KiB of fp32 logits each."""
NUM_WARPS = 4


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
    # Words beyond the row count as all ones: nothing is forbidden there.
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
    bitmask_kernel[masked, triton.cdiv(words, BLOCK_WORDS)](
        logits, rows, bitmask, logits.shape[1], words, block_words=BLOCK_WORDS, num_warps=NUM_WARPS
    )
