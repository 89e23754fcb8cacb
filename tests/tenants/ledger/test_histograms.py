"""Each time is in one bucket, a bound is the last time of its own, and quantiles stay in the bucket of the exact one."""

from hypothesis import given
from hypothesis import strategies as st

from loraplex.tenants.ledger.histograms import (
    EMPTY,
    GAP_BOUNDS_MS,
    TTFT_BOUNDS_MS,
    bucket_of,
    counted,
    quantile,
)


def test_a_bound_belongs_to_its_bucket() -> None:
    for bounds in (TTFT_BOUNDS_MS, GAP_BOUNDS_MS):
        assert len(bounds) + 1 == len(EMPTY) and list(bounds) == sorted(set(bounds))
        assert [bucket_of(bounds, bound) for bound in bounds] == [*range(len(bounds))]
        assert bucket_of(bounds, bounds[-1] + 0.1) == len(bounds)
        assert bucket_of(bounds, 0) == 0


@given(st.lists(st.integers(1, 30_000), min_size=1), st.sampled_from([50, 95, 100]))
def test_a_quantile_is_in_the_bucket_of_the_exact_one(times: list[int], percent: int) -> None:
    exact = sorted(times)[-(-percent * len(times) // 100) - 1]
    found = quantile(TTFT_BOUNDS_MS, counted(TTFT_BOUNDS_MS, times), percent)
    place = bucket_of(TTFT_BOUNDS_MS, exact)
    assert found is not None
    assert (0, *TTFT_BOUNDS_MS)[place] <= found <= TTFT_BOUNDS_MS[place]


def test_quantiles_at_the_ends() -> None:
    assert quantile(TTFT_BOUNDS_MS, EMPTY, 50) is None
    assert quantile(TTFT_BOUNDS_MS, counted(TTFT_BOUNDS_MS, [60_000]), 50) == TTFT_BOUNDS_MS[-1]
    assert quantile(TTFT_BOUNDS_MS, counted(TTFT_BOUNDS_MS, [60, 60, 90, 90]), 50) == 75
