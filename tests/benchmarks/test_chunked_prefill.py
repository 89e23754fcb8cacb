"""Gaps between tokens are counted by whether they overlap the long prompt's prefill."""

import pytest
from tests.benchmarks.chunked_prefill import split_gaps
from tests.platform.bench.test_client import REQUEST, USAGE, event, text

from loraplex.platform.bench.client import StreamRecord
from loraplex.platform.bench.report import BenchFailed


def streamed(times: list[float], sent_at: float = 0.0) -> StreamRecord:
    """A whole stream with one piece of text at each time."""
    end = event(choices=[], usage=USAGE) + b"data: [DONE]\n\n"
    chunks = [*((at, text("x")) for at in times), (times[-1], end)]
    return StreamRecord(REQUEST, sent_at=sent_at, ended_at=times[-1], chunks=chunks)


def test_gaps_are_sorted_by_the_long_prompts_prefill() -> None:
    row = streamed([1.0, 1.5, 2.25, 4.0, 4.5, 5.0])
    long = streamed([4.25], sent_at=2.0)
    found = split_gaps([row], long)
    assert found.before == (0.5,)
    assert found.during == (0.75, 1.75, 0.5)
    assert found.long_ttft == 2.25


def test_a_row_that_ended_before_cannot_be_disturbed() -> None:
    with pytest.raises(BenchFailed, match="ended during"):
        split_gaps([streamed([1.0, 2.0])], streamed([4.0], sent_at=1.5))
