"""Failures per client network: a burst, a refill, and a bounded memory."""

import pytest

from loraplex.platform.auth import failure_buckets
from loraplex.platform.auth.failure_buckets import BURST, REFILL_S, FailureBuckets


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def taken(buckets: FailureBuckets, network: str, most: int = 1000) -> int:
    """How many failures pass before none is left."""
    return next((number for number in range(most) if not buckets.take(network)), most)


def test_a_network_has_a_burst_and_regains_one_failure_at_a_time() -> None:
    clock = Clock()
    buckets = FailureBuckets(clock)
    assert taken(buckets, "a") == BURST and taken(buckets, "b") == BURST
    assert buckets.is_empty("a") and not buckets.is_empty("c")
    clock.now = 3 * REFILL_S
    assert taken(buckets, "a") == 3
    clock.now = 2 * BURST * REFILL_S
    assert taken(buckets, "a") == BURST


def test_what_was_no_failure_is_given_back() -> None:
    buckets = FailureBuckets(Clock())
    for _ in range(3 * BURST):
        buckets.take("a")
        buckets.give_back("a")
    assert len(buckets) == 0
    buckets.give_back("never taken")
    assert taken(buckets, "a") == BURST


def test_the_newest_networks_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_buckets, "MAX_SUBJECTS", 3)
    buckets = FailureBuckets(Clock())
    for number in range(10):
        buckets.take(str(number))
    assert len(buckets) == 3
