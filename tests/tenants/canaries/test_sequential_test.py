"""The test of a canary keeps its error rate however often it is looked at, and finds a bad version early."""

import math

import numpy as np
import pytest
from tests.tenants.canaries.releases import release

from loraplex.tenants.canaries.records import ALPHA
from loraplex.tenants.canaries.sequential_test import log_e_value


@pytest.mark.parametrize("bound", [0.001, 0.05, 0.5, 0.9])
@pytest.mark.parametrize("trials", [0, 1, 40])
def test_the_mean_of_the_e_value_is_one_at_the_bound_and_less_below(bound: float, trials: int) -> None:
    def mean(share: float) -> float:
        return sum(
            math.comb(trials, hits)
            * share**hits
            * (1 - share) ** (trials - hits)
            * math.exp(log_e_value(hits, trials, bound))
            for hits in range(trials + 1)
        )

    assert mean(bound) == pytest.approx(1)
    assert mean(bound / 2) <= 1 + 1e-9


def test_evidence_grows_with_hits_and_stays_finite() -> None:
    values = [log_e_value(hits, 100, 0.05) for hits in range(101)]
    assert values == sorted(values) and values[5] < 0 < values[20]
    assert math.isfinite(log_e_value(1_000_000, 1_000_000, 0.001))


@pytest.mark.parametrize("share", [0.05, 0.1])
def test_equal_versions_hardly_ever_go_back(share: float) -> None:
    random = np.random.default_rng(5)
    back = [
        release(random, failing=(share, share), ratio=1.0, others=True, looks=40, requests=500)
        for _ in range(1000)
    ]
    gone = sum(map(math.isfinite, back))
    print(f"{gone} of 1000 equal releases that fail {share:.0%} go back")
    assert gone <= ALPHA * 1000


@pytest.mark.parametrize(("ratio", "least"), [(1.0, (50, 180, 199)), (2.0, (10, 130, 190))])
def test_a_version_that_fails_ten_points_more_often_goes_back(
    ratio: float, least: tuple[int, int, int]
) -> None:
    random = np.random.default_rng(6)
    back = [release(random, failing=(0.02, 0.12), ratio=ratio, looks=300, requests=40) for _ in range(200)]
    found = [sum(each <= most for each in back) for most in (100, 200, 400)]
    print(f"max_failure_ratio {ratio:g}: of 200 releases {found} are back by 100, 200, 400 requests")
    assert all(each >= bound for each, bound in zip(found, least, strict=True))
