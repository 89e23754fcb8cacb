"""The service of a record counts what arrived within the window, as the scheduler charges it."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest
from tests.benchmarks import fair_share
from tests.benchmarks.fair_share import COLUMNS, OUTPUT_COST, FairShareShape, _cost, _measure_quiet, _World
from tests.benchmarks.tenant_load import Offered, OfferJob

from loraplex.platform.bench.client import Completion, CompletionRequest, StreamRecord
from loraplex.platform.bench.fixtures import BenchTenant
from loraplex.platform.bench.load import LoadResult
from loraplex.platform.bench.report import BenchFailed, Report
from loraplex.platform.bench.workload import draw_prompts

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


class ScriptedWorld:
    """Stands for the server and its clients: keeps what was sent, and answers within 0.1 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capacities: Sequence[float]) -> None:
        self.sent: dict[str, list[tuple[int, ...]]] = {"quiet": [], "loud": []}
        self.rates: list[float] = []
        self.waits: list[float] = []
        self._capacities = iter(capacities)
        for name in ("run_load", "begin_offer", "end_offer", "_wait_idle", "_capacity"):
            monkeypatch.setattr(fair_share, name, getattr(self, name.removeprefix("_")))

    async def measure(self, rounds: int) -> Report:
        quiet, loud = (BenchTenant(name, uuid4(), name) for name in ("quiet", "loud"))
        shape = FairShareShape(seconds=5.0, rounds=rounds, input_len=8)
        world = _World(cast(Any, SimpleNamespace(base_url="http://none")), shape, range(10_000))
        report = Report("fair-share", COLUMNS)
        await _measure_quiet(world, quiet, loud, report, lambda line: None)
        return report

    async def capacity(self, *_: Any) -> float:
        return next(self._capacities)

    async def wait_idle(self, base_url: str) -> None:
        pass

    async def run_load(
        self, base_url: str, requests: Sequence[CompletionRequest], offsets: Sequence[float]
    ) -> LoadResult:
        self.sent["quiet"] += [tuple(map(int, request.prompt)) for request in requests]
        wait = self.waits.pop(0) if self.waits else 0.1
        answers = [
            Completion("a", (wait,), 8, request.output_len, 0, True, None, 0.2) for request in requests
        ]
        return LoadResult(tuple(requests), tuple(answers), 1.0)

    async def begin_offer(self, job: OfferJob) -> float:
        self.rates.append(job.rate)
        self.sent["loud"] += [tuple(map(int, each)) for each in draw_prompts(job.pool, 20, 8, job.seed)]
        return job.rate

    async def end_offer(self, rate: float) -> Offered:
        return Offered(sent=int(rate * 10), seconds=10.0)


async def test_no_case_repeats_a_prompt_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated prompt is in the prefix cache: the later case of a round would cost a part of the earlier one."""
    world = ScriptedWorld(monkeypatch, [4.0] * 4)
    await world.measure(rounds=2)
    for prompts in world.sent.values():
        assert len(prompts) > 6 and len(set(prompts)) == len(prompts)


async def test_a_round_in_which_the_speed_changed_is_repeated_with_the_new_capacity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = ScriptedWorld(monkeypatch, [4.0, 4.0, 5.0, 5.0, 5.0])
    report = await world.measure(rounds=2)
    assert world.rates[2:] == [2.0, 20.0, 25.0, 2.5, 2.5, 25.0], "the order of the cases alternates"
    assert [case.figure["rounds_repeated"] for case in report.cases] == [1, 1]
    assert [case.figure["offered_per_s"] for case in report.cases] == [2.5, 25.0]


async def test_a_burst_of_one_round_does_not_set_the_median_of_the_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The quiet tenant waits 1 s in the first round beside either neighbour, and else 0.1 s and 0.2 s."""
    world = ScriptedWorld(monkeypatch, [4.0] * 5)
    world.waits = [0.1, 0.1, 1.0, 1.0, 0.2, 0.1, 0.1, 0.2]
    report = await world.measure(rounds=3)
    assert [ratio.value for ratio in report.ratios] == [1.0, 2.0]


async def test_a_machine_whose_speed_never_stays_gives_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    world = ScriptedWorld(monkeypatch, [2.0**number for number in range(6)])
    with pytest.raises(BenchFailed, match="speed"):
        await world.measure(rounds=2)
