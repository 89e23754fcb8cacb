"""Loads are functions of their seed and follow the distribution they name."""

from collections import Counter
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.platform.bench.workload import (
    Distribution,
    arrival_offsets,
    draw_prompts,
    pick_adapters,
    zipf_weights,
)


@pytest.mark.parametrize("distribution", get_args(Distribution))
def test_picks_are_repeatable_and_in_range(distribution: Distribution) -> None:
    picks = pick_adapters(7, 100, distribution, 1.1, seed=3)
    assert picks == pick_adapters(7, 100, distribution, 1.1, seed=3)
    assert set(picks) <= set(range(7))


def test_zipf_prefers_the_first_by_its_exponent() -> None:
    picks = Counter(pick_adapters(300, 20_000, "zipf", 1.1, seed=0))
    assert picks[0] / picks[9] == pytest.approx(10**1.1, rel=0.25)
    assert zipf_weights(3, 0.0) == [1.0, 1.0, 1.0]


def test_distinct_goes_round() -> None:
    assert pick_adapters(3, 5, "distinct", 1.1, seed=0) == [0, 1, 2, 0, 1]


def test_poisson_arrivals_have_the_rate() -> None:
    offsets = arrival_offsets(4000, 20.0, seed=1)
    assert offsets == sorted(offsets)
    assert offsets[-1] == pytest.approx(4000 / 20, rel=0.1)
    assert arrival_offsets(3, None, seed=1) == [0.0, 0.0, 0.0]


@given(length=st.integers(1, 40), prefix=st.lists(st.integers(100, 200), max_size=50), seed=st.integers(0, 9))
def test_prompts_have_their_length_and_prefix(length: int, prefix: list[int], seed: int) -> None:
    pool = list(range(50))
    prompts = draw_prompts(pool, 3, length, seed, prefix)
    assert all(len(prompt) == length for prompt in prompts)
    assert all(prompt[: len(prefix)] == prefix[:length] for prompt in prompts)
    assert prompts == draw_prompts(pool, 3, length, seed, prefix)
