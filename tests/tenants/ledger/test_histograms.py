"""Each time is in one bucket, and a bound is the last time of its own."""

from loraplex.tenants.ledger.histograms import EMPTY, GAP_BOUNDS_MS, TTFT_BOUNDS_MS, bucket_of


def test_a_bound_belongs_to_its_bucket() -> None:
    for bounds in (TTFT_BOUNDS_MS, GAP_BOUNDS_MS):
        assert len(bounds) + 1 == len(EMPTY) and list(bounds) == sorted(set(bounds))
        assert [bucket_of(bounds, bound) for bound in bounds] == [*range(len(bounds))]
        assert bucket_of(bounds, bounds[-1] + 0.1) == len(bounds)
        assert bucket_of(bounds, 0) == 0
