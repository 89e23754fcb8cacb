"""Every backend of the bitmask against a loop over tokens, on vocabularies that end in the middle of a word."""

import math
from collections.abc import Callable

import pytest
import torch

from loraplex.engine.kernels.cpu import bitmask as compiled
from loraplex.engine.kernels.cpu import numba_bridge
from loraplex.engine.kernels.reference import bitmask as reference

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def problem(vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits with NaN and infinities, four masked rows out of order, and words of ones and of zeros."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(7, vocab, generator=generator).to(dtype)
    logits[:, :: vocab // 5 + 1] = torch.tensor(math.nan)
    logits[:, 1 :: vocab // 3 + 1] = math.inf
    words = (vocab + 31) // 32
    bitmask = torch.randint(-(2**31), 2**31, (4, words), generator=generator).to(torch.int32)
    bitmask[0], bitmask[1] = -1, 0
    bitmask[2, ::2] = torch.tensor([-1, 0]).repeat(words)[: len(bitmask[2, ::2])].to(torch.int32)
    return logits, torch.tensor([6, 0, 3, 2]), bitmask


def expected(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    result = logits.clone()
    for i, row in enumerate(rows.tolist()):
        for token in range(logits.shape[1]):
            if not int(bitmask[i, token // 32]) >> token % 32 & 1:
                result[row, token] = -math.inf
    return result


def check(kernel: Kernel, vocab: int, dtype: torch.dtype) -> None:
    logits, rows, bitmask = problem(vocab, dtype)
    # A row more in memory: writing beyond the last one would show.
    memory = torch.zeros(8, vocab, dtype=dtype)
    memory[:7] = logits
    kernel(memory[:7], rows, bitmask)
    assert torch.equal(memory[:7].nan_to_num(12.0), expected(logits, rows, bitmask).nan_to_num(12.0))
    assert not memory[7].any()


@pytest.mark.parametrize("vocab", [1, 31, 32, 70, 1024, 4099])
def test_reference(vocab: int, dtype: torch.dtype) -> None:
    check(reference.apply_bitmask, vocab, dtype)


@pytest.mark.parametrize("vocab", [1, 31, 32, 70, 1024, 4099])
def test_compiled(vocab: int, dtype: torch.dtype) -> None:
    if not numba_bridge.is_available():
        pytest.skip("this CPU has no compiled body")
    check(compiled.apply_bitmask, vocab, dtype)


def test_compiled_shares_the_work_out(threads: int) -> None:
    check(compiled.apply_bitmask, 40_000 // threads, torch.float32)
