"""The service of a record counts what arrived within the window, as the scheduler charges it."""

import pytest
from tests.benchmarks.fair_share import OUTPUT_COST, _cost

from loraplex.platform.bench.client import CompletionRequest, StreamRecord
from loraplex.platform.bench.report import BenchFailed

REQUEST = CompletionRequest("m", "p", 4, "key")


def record(*times: float, end: bytes = b"data: [DONE]\n\n") -> StreamRecord:
    text = b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 4}}\n\n'
    chunks = [*((at, text) for at in times), (times[-1], usage), (times[-1], end)]
    return StreamRecord(REQUEST, sent_at=0.0, ended_at=times[-1], chunks=chunks, ended=True)


def test_tokens_count_where_they_arrive_and_the_prompt_with_the_first() -> None:
    assert _cost(record(1.0, 2.0, 3.0, 4.0), (0.0, 9.0)) == 10 + OUTPUT_COST * 4
    assert _cost(record(1.0, 2.0, 3.0, 4.0), (2.5, 9.0)) == OUTPUT_COST * 2
    assert _cost(record(1.0, 2.0, 3.0, 4.0), (5.0, 9.0)) == 0


def test_a_stream_that_broke_gives_no_figure() -> None:
    with pytest.raises(BenchFailed):
        _cost(record(1.0, end=b""), (0.0, 9.0))
