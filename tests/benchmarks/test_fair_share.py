"""The service of a record counts what arrived within the window, as the scheduler charges it."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest
from tests.benchmarks import fair_share
from tests.benchmarks.fair_share import COLUMNS, OUTPUT_COST, FairShareShape, _cost, _measure_quiet, _World

from loraplex.platform.bench.client import Completion, CompletionRequest, StreamRecord
from loraplex.platform.bench.fixtures import BenchTenant
from loraplex.platform.bench.load import LoadResult
from loraplex.platform.bench.report import BenchFailed, Report

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


async def test_no_case_repeats_a_prompt_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated prompt is in the prefix cache: the later case of a round would cost a part of the earlier one."""
    quiet, loud = (BenchTenant(name, uuid4(), name) for name in ("quiet", "loud"))
    sent: dict[str, list[tuple[int, ...]]] = {"quiet": [], "loud": []}

    async def run_load(
        base_url: str, requests: Sequence[CompletionRequest], offsets: Sequence[float]
    ) -> LoadResult:
        sent[requests[0].api_key] += [tuple(map(int, request.prompt)) for request in requests]
        await (asyncio.sleep(0.01) if requests[0].api_key == "quiet" else asyncio.Event().wait())
        answers = [Completion("a", (0.1,), 8, request.output_len, 0, True, None, 0.2) for request in requests]
        return LoadResult(tuple(requests), tuple(answers), 1.0)

    monkeypatch.setattr(fair_share, "run_load", run_load)
    shape = FairShareShape(seconds=5.0, rounds=2, input_len=8)
    world = _World(cast(Any, SimpleNamespace(base_url="http://none")), shape, range(10_000))
    await _measure_quiet(world, quiet, loud, 4.0, Report("fair-share", COLUMNS), lambda line: None)
    for prompts in sent.values():
        assert len(prompts) > 6 and len(set(prompts)) == len(prompts)
