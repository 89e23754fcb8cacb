"""Filters against a plain definition by sorting, on both sides of the prefilter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.sampling.truncation import Truncation, Truncations, truncate

OFF = Truncation(0, 1.0, 0.0)


def kept_naively(row: list[float], truncation: Truncation) -> set[int]:
    """Filters one after another, each over what the one before left; ties at a border stay."""
    floor = truncation.min_p
    ranking = sorted((weight for weight in row if weight >= floor), reverse=True)
    if truncation.top_k:
        floor = max(floor, ranking[min(truncation.top_k, len(ranking)) - 1])
    ranking = [weight for weight in ranking if weight >= floor]
    if truncation.top_p < 1.0:
        total, mass = sum(ranking), 0.0
        for weight in ranking:
            mass += weight
            if mass >= truncation.top_p * total:
                floor = weight
                break
    return {token for token, weight in enumerate(row) if weight >= floor and weight > 0.0}


def weights_of(rows: int, vocab: int, seed: int, spread: float = 1.0) -> torch.Tensor:
    scores = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread
    return (scores - scores.amax(dim=-1, keepdim=True)).exp()


def kept(weights: torch.Tensor, truncations: list[Truncation]) -> list[set[int]]:
    result = truncate(weights, Truncations.of(truncations))
    assert torch.equal(result[result > 0], weights[result > 0])
    return [set(row.nonzero().flatten().tolist()) for row in result]


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
    weights = weights_of(len(truncations), vocab, seed, spread)
    expected = [kept_naively(row, t) for row, t in zip(weights.tolist(), truncations, strict=True)]
    assert kept(weights, truncations) == expected


def test_ties_at_the_border_are_kept() -> None:
    weights = torch.tensor([[1.0, 0.4, 0.4, 0.4, 0.1]])
    assert kept(weights, [Truncation(2, 1.0, 0.0)]) == [{0, 1, 2, 3}]
    assert kept(weights, [Truncation(0, 0.6, 0.0)]) == [{0, 1, 2, 3}]


def test_many_ties_are_decided_by_the_whole_row() -> None:
    weights = torch.ones(1, 1000)
    weights[0, 500:] = 0.01
    assert kept(weights, [Truncation(300, 0.9, 0.0)]) == [set(range(500))]


def test_a_nucleus_wider_than_the_prefilter_is_decided_by_the_whole_row() -> None:
    weights = weights_of(1, 500, seed=1, spread=0.2)
    for share in (0.5, 0.9):
        expected = kept_naively(weights[0].tolist(), Truncation(0, share, 0.0))
        assert len(expected) > 128
        assert kept(weights, [Truncation(0, share, 0.0)]) == [expected]


def test_a_row_without_filters_keeps_everything_beside_one_with() -> None:
    weights = torch.tensor([[1.0, 1e-20, 0.0], [1.0, 1e-20, 1e-30]])
    assert kept(weights, [OFF, Truncation(1, 1.0, 0.0)]) == [{0, 1}, {0}]


@pytest.mark.parametrize("other_row", [OFF, Truncation(0, 0.3, 0.0), Truncation(900, 1.0, 0.0)])
def test_a_row_does_not_depend_on_other_rows(other_row: Truncation) -> None:
    weights = weights_of(2, 1000, seed=3)
    mine = Truncation(0, 0.7, 0.001)
    assert torch.equal(
        truncate(weights[:1], Truncations.of([mine]))[0],
        truncate(weights, Truncations.of([mine, other_row]))[0],
    )
