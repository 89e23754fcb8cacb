"""Triton kernels for the grammar bitmask and for the cutoffs of top-k and top-p, which are compared with a sort.

They run interpreted in a process of their own, because the switch is read at import, and on CUDA where there is one.
"""

import pytest
import torch
from tests.engine.interpreter_runs import INTERPRETING, InterpreterRuns

from loraplex.engine.kernels.reference import bitmask as reference
from loraplex.engine.sampling.truncation import Truncation, Truncations, truncate

pytest.importorskip("triton")

FILTERS = [
    Truncation(1, 1.0, 0.0),
    Truncation(40, 1.0, 0.0),
    Truncation(10**6, 1.0, 0.0),
    Truncation(0, 0.1, 0.0),
    Truncation(0, 0.95, 0.0),
    Truncation(0, 1e-9, 0.0),
    Truncation(0, 0.9, 0.05),
    Truncation(30, 0.8, 0.001),
    Truncation(0, 1.0, 0.1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [1, 70, 2048, 4099, 49_152])
def test_bitmask_equals_the_reference(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    from loraplex.engine.kernels.triton.logit_masks import apply_bitmask

    generator = torch.Generator().manual_seed(vocab)
    memory = torch.randn(6, vocab, generator=generator).to(device, dtype)
    rows = torch.tensor([4, 0, 3], device=device)
    words = (vocab + 31) // 32
    bitmask = torch.randint(-(2**31), 2**31, (3, words), generator=generator).to(torch.int32)
    bitmask[0, 0], bitmask[1, -1] = 0, -1
    wanted = memory.clone()
    reference.apply_bitmask(wanted[:5], rows, bitmask.to(device))
    apply_bitmask(memory[:5], rows, bitmask.to(device))
    assert torch.equal(memory, wanted)


def truncated_by_cutoffs(weights: torch.Tensor, filters: list[Truncation]) -> torch.Tensor:
    from loraplex.engine.kernels.triton.logit_masks import raise_cutoffs

    lowest, *rest = (tensor.to(weights.device) for tensor in Truncations.of(filters).tensors)
    raise_cutoffs(weights, lowest, *rest)
    return torch.where(weights >= lowest, weights, 0.0).cpu()


@pytest.mark.parametrize(("vocab", "spread"), [(9, 0.2), (8200, 0.2), (8200, 4.0)])
def test_cutoffs_keep_what_a_sort_keeps(vocab: int, spread: float, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(vocab)
    scores = torch.randn(len(FILTERS), vocab, generator=generator) * spread
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    assert torch.equal(
        truncated_by_cutoffs(weights.to(device), FILTERS), truncate(weights.clone(), Truncations.of(FILTERS))
    )


def test_cutoffs_keep_ties_and_depend_on_one_row_only(device: torch.device) -> None:
    weights = torch.tensor([[1.0, 0.4, 0.4, 0.4, 0.1]]).repeat(4, 1)
    filters = [
        Truncation(2, 1.0, 0.0),
        Truncation(0, 1.0, 0.0),
        Truncation(0, 0.6, 0.0),
        Truncation(0, 0.3, 0),
    ]
    weights[3] = torch.nan
    kept = [(row > 0).sum().item() for row in truncated_by_cutoffs(weights.to(device), filters)]
    assert kept[:3] == [4, 5, 4]


@pytest.mark.skipif(INTERPRETING, reason="this is the interpreter's process")
@pytest.mark.interpreted(__file__, seconds=10)
def test_interpreted(interpreter_runs: InterpreterRuns, request: pytest.FixtureRequest) -> None:
    assert interpreter_runs.passed(request.node) == 14
