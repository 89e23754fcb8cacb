"""Per-head norm, rotary embedding and KV write: the torch backend against a loop, the compiled one against the torch
backend.
"""

import math

import pytest
import torch
from torch import Tensor

from loraplex.engine.kernels.cpu import rotary as compiled
from loraplex.engine.kernels.reference import rotary as reference

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
EPSILON = 1e-6
BLOCKS, BLOCK_SIZE = 12, 16
# heads, KV heads, head size, rotated half (0: a layer without positions), q/k norm
CASES = [
    (1, 1, 16, 8, False),
    (4, 2, 64, 32, True),
    (6, 2, 96, 24, False),
    (8, 1, 128, 64, False),
    (4, 4, 32, 0, False),
    (4, 2, 32, 0, True),
    (3, 1, 80, 10, True),
]


class Operands:
    """A step's tokens in no order of slots; the KV cache holds NaN."""

    def __init__(
        self, tokens: int, case: tuple[int, int, int, int, bool], dtype: torch.dtype, seed: int = 0
    ) -> None:
        heads, kv_heads, size, half, normed = case
        generator = torch.Generator().manual_seed(seed)
        self.heads, self.kv_heads, self.size, self.half = heads, kv_heads, size, half
        self.qkv = torch.randn((tokens, (heads + 2 * kv_heads) * size), generator=generator).to(dtype)
        self.positions = torch.randint(0, 500, (tokens,), generator=generator)
        self.slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=generator)[:tokens]
        angles = torch.arange(500).unsqueeze(1) * torch.logspace(0, -3, max(half, 1)).unsqueeze(0)
        self.rope = (angles.cos(), angles.sin()) if half else None
        weights = (torch.randn((2, size), generator=generator) + 1).to(dtype)
        self.norms = (weights[0], weights[1]) if normed else None

    def run(self, body: object) -> tuple[Tensor, Tensor]:
        """(qkv, cache) after the call."""
        qkv = self.qkv.clone()
        shape = (BLOCKS, BLOCK_SIZE, 2, self.kv_heads, self.size)
        cache = torch.full(shape, torch.nan, dtype=qkv.dtype)
        body.rotary_write_kv(  # type: ignore[attr-defined]
            qkv, cache, self.positions, self.slots, self.rope, self.norms, EPSILON
        )
        return qkv, cache

    def expected_head(self, token: int, head: int) -> Tensor:
        """One head in float64, pair by pair."""
        values = self.qkv[token, head * self.size : (head + 1) * self.size].double()
        if head >= self.heads + self.kv_heads:
            return values
        if self.norms is not None:
            weight = self.norms[0 if head < self.heads else 1].double()
            values = values / (values.pow(2).mean() + EPSILON).sqrt() * weight
        rotated = values.clone()
        for i in range(self.half if self.rope is not None else 0):
            angle = int(self.positions[token]) * float(torch.logspace(0, -3, self.half)[i])
            a, b = values[i], values[self.half + i]
            rotated[i] = a * math.cos(angle) - b * math.sin(angle)
            rotated[self.half + i] = b * math.cos(angle) + a * math.sin(angle)
        return rotated


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_equals_a_loop(case: tuple[int, int, int, int, bool], dtype: torch.dtype) -> None:
    operands = Operands(5, case, dtype)
    qkv, cache = operands.run(reference)
    heads = operands.heads + 2 * operands.kv_heads
    expected = torch.stack(
        [torch.cat([operands.expected_head(t, h) for h in range(heads)]) for t in range(5)]
    )
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(qkv.double(), expected, atol=4 * tolerance, rtol=4 * tolerance)
    check_cache(operands, qkv, cache)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("tokens", [1, 129])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_equals_the_reference(
    case: tuple[int, int, int, int, bool], tokens: int, dtype: torch.dtype
) -> None:
    operands = Operands(tokens, case, dtype)
    qkv, cache = operands.run(compiled)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(qkv, operands.run(reference)[0], atol=2 * tolerance, rtol=tolerance)
    check_cache(operands, qkv, cache)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_nan_stays_with_its_token(case: tuple[int, int, int, int, bool], dtype: torch.dtype) -> None:
    operands = Operands(9, case, dtype)
    clean, _ = operands.run(compiled)
    operands.qkv[4] = torch.nan
    qkv, cache = operands.run(compiled)
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert qkv[4].isnan().all()
    assert torch.equal(qkv[others], clean[others])
    written = cache.view(-1, 2, operands.kv_heads, operands.size)[operands.slots[others]]
    assert not written.isnan().any()


def check_cache(operands: Operands, qkv: Tensor, cache: Tensor) -> None:
    """K and V of every token in its slot, and nothing anywhere else."""
    flat = cache.view(-1, 2 * operands.kv_heads * operands.size)
    assert torch.equal(flat[operands.slots], qkv[:, operands.heads * operands.size :])
    untouched = torch.ones(flat.shape[0], dtype=torch.bool)
    untouched[operands.slots] = False
    assert flat[untouched].isnan().all()
