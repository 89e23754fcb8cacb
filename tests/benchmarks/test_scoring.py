"""Gaps between tokens are counted while the load runs."""

import pytest
from tests.benchmarks.scoring import gaps_beside
from tests.benchmarks.test_chunked_prefill import streamed

from loraplex.platform.bench.report import BenchFailed


def test_gaps_are_those_beside_the_load() -> None:
    row = streamed([1.0, 1.5, 2.25, 4.0, 4.5, 5.0])
    found = gaps_beside([row], [streamed([2.5], sent_at=2.0), streamed([4.25], sent_at=2.1)])
    assert found.gaps == (0.75, 1.75, 0.5) and found.seconds == 2.25


def test_a_row_that_ended_before_the_load_is_no_measurement() -> None:
    with pytest.raises(BenchFailed, match="ended before"):
        gaps_beside([streamed([1.0, 2.0])], [streamed([4.0], sent_at=1.5)])
