"""Cutoffs in Triton against those by sorting: interpreted on the CPU, in a process of its own, and on CUDA where there is one."""

from pathlib import Path

import pytest
import torch
from tests.engine.interpreter_runs import INTERPRETING, InterpreterRuns

from loraplex.engine.sampling.truncation import Truncation, Truncations, truncate

pytest.importorskip("triton")

ROOT = Path(__file__).parents[4]

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


def raised(weights: torch.Tensor, filters: list[Truncation]) -> torch.Tensor:
    from loraplex.engine.kernels.triton.logit_masks import raise_cutoffs

    lowest, *rest = (tensor.to(weights.device) for tensor in Truncations.of(filters).tensors)
    raise_cutoffs(weights, lowest, *rest)
    return torch.where(weights >= lowest, weights, 0.0).cpu()


@pytest.mark.parametrize(("vocab", "spread"), [(9, 0.2), (8200, 0.2), (8200, 4.0)])
def test_keeps_what_a_sort_keeps(vocab: int, spread: float, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(vocab)
    scores = torch.randn(len(FILTERS), vocab, generator=generator) * spread
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    assert torch.equal(
        raised(weights.to(device), FILTERS), truncate(weights.clone(), Truncations.of(FILTERS))
    )


def test_ties_are_kept_and_rows_are_their_own(device: torch.device) -> None:
    weights = torch.tensor([[1.0, 0.4, 0.4, 0.4, 0.1]]).repeat(4, 1)
    filters = [
        Truncation(2, 1.0, 0.0),
        Truncation(0, 1.0, 0.0),
        Truncation(0, 0.6, 0.0),
        Truncation(0, 0.3, 0),
    ]
    weights[3] = torch.nan
    kept = [(row > 0).sum().item() for row in raised(weights.to(device), filters)]
    assert kept[:3] == [4, 5, 4]


@pytest.mark.skipif(INTERPRETING, reason="this is the interpreter's process")
@pytest.mark.interpreted(__file__, seconds=6)
def test_interpreted(interpreter_runs: InterpreterRuns, request: pytest.FixtureRequest) -> None:
    assert interpreter_runs.passed(request.node) == 4
