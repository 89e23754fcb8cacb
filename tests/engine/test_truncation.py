"""Cutoffs against a plain definition by sorting, on both sides of the prefilter."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.truncation import Truncation, cutoffs

OFF = Truncation(0, 1.0, 0.0)


def kept_naively(row: list[float], truncation: Truncation) -> set[int]:
    """Filters one after another, each over what the one before left; ties at a border stay."""
    floor = math.log(truncation.min_p) if truncation.min_p else -math.inf
    ranking = sorted((score for score in row if score >= floor), reverse=True)
    if truncation.top_k:
        floor = max(floor, ranking[min(truncation.top_k, len(ranking)) - 1])
    ranking = [score for score in ranking if score >= floor]
    if truncation.top_p < 1.0:
        total, mass = sum(map(math.exp, ranking)), 0.0
        for score in ranking:
            mass += math.exp(score)
            if mass >= truncation.top_p * total:
                floor = score
                break
    return {token for token, score in enumerate(row) if score >= floor}


def kept(scores: torch.Tensor, truncations: list[Truncation]) -> list[set[int]]:
    cutoff = cutoffs(scores, truncations)
    assert cutoff is not None
    return [set(row.nonzero().flatten().tolist()) for row in scores >= cutoff]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([9, 500]),
    st.sampled_from([0.2, 2.0, 6.0]),
    st.lists(
        st.builds(
            Truncation,
            st.sampled_from([0, 1, 3, 127, 128, 129, 400, 10**6]),
            st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
            st.sampled_from([0.0, 0.01, 0.3, 1.0]),
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_equals_the_definition(seed: int, vocab: int, spread: float, truncations: list[Truncation]) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Distinct scores far enough apart that rounding of a mass cannot move a border.
    scores = torch.randn(len(truncations), vocab, generator=generator) * spread
    scores -= scores.amax(dim=-1, keepdim=True)
    if not any(t.needs_ranking or t.min_p for t in truncations):
        assert cutoffs(scores, truncations) is None
        return
    expected = [kept_naively(row, t) for row, t in zip(scores.tolist(), truncations, strict=True)]
    assert kept(scores, truncations) == expected


def test_ties_at_the_border_are_kept() -> None:
    scores = torch.tensor([[0.0, -1.0, -1.0, -1.0, -2.0]])
    assert kept(scores, [Truncation(2, 1.0, 0.0)]) == [{0, 1, 2, 3}]
    assert kept(scores, [Truncation(0, 0.6, 0.0)]) == [{0, 1, 2, 3}]


def test_many_ties_are_decided_by_the_whole_row() -> None:
    scores = torch.zeros(1, 1000)
    scores[0, 500:] = -5.0
    assert kept(scores, [Truncation(300, 0.9, 0.0)]) == [set(range(500))]


def test_a_row_without_filters_keeps_everything_beside_one_with() -> None:
    scores = torch.tensor([[0.0, -50.0, -torch.inf], [0.0, -50.0, -60.0]])
    assert kept(scores, [OFF, Truncation(1, 1.0, 0.0)]) == [{0, 1, 2}, {0}]


@pytest.mark.parametrize("neighbour", [OFF, Truncation(0, 0.3, 0.0), Truncation(900, 1.0, 0.0)])
def test_a_row_does_not_depend_on_its_neighbour(neighbour: Truncation) -> None:
    scores = torch.randn(2, 1000, generator=torch.Generator().manual_seed(3))
    scores -= scores.amax(dim=-1, keepdim=True)
    mine = Truncation(0, 0.7, 0.001)
    alone, together = cutoffs(scores[:1], [mine]), cutoffs(scores, [mine, neighbour])
    assert alone is not None and together is not None
    assert alone[0].item() == together[0].item()
