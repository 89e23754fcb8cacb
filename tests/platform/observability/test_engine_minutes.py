"""Minutes of engines: what is counted, what is missing, and two gateways of one host."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from tests.platform.engines.managed_engine import Managed

from loraplex.engine.messages import EngineStats
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.observability.engine_minutes import EngineMinutes
from loraplex.platform.observability.request_record import FinishedRequest, RequestRecord
from loraplex.platform.observability.request_stats import RequestStats
from loraplex.tenants.engine_minutes.records import gap_ms, ttft_ms

START = datetime(2026, 11, 30, 12, 0, 30, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def engine(**stats: Any) -> Managed:
    managed = Managed()
    answers(managed, **stats)
    return managed


def answers(managed: Managed, **stats: Any) -> None:
    managed.last_stats = EngineStats(**stats)


def ended(engine: str | None, ttft_s: float | None, gaps: list[float]) -> FinishedRequest:
    stats = RequestStats(arrival=0.0, n=1, max_tokens=9, prompt_lengths=[1], engine=engine)
    stats.first_token, stats.token_gaps = ttft_s, gaps
    stats.timings()
    record = RequestRecord(stats=stats)
    return FinishedRequest(scope={}, record=record, handler="/", began=0, ended=1, status=200)


def test_a_minute_has_what_grew_in_it_and_the_most_of_the_rest() -> None:
    watched = engine(generation_tokens=1000, running=1, total_blocks=10)
    minutes = EngineMinutes(EnginePool([watched]), uuid4())
    assert minutes.sample(START) == []
    answers(watched, generation_tokens=1500, running=7, waiting=2, referenced_blocks=5, total_blocks=10)
    assert minutes.sample(START + timedelta(seconds=10)) == []
    answers(watched, generation_tokens=1600, running=2, total_blocks=10, resident_adapters=["a" * 64])
    minutes.sample(START + timedelta(seconds=20))
    for seconds in (0.2, 0.2, 0.2, 4.0):
        minutes.observe(ended("0", seconds, [0.012] * 3))
    minutes.observe(ended(None, None, []))
    [minute] = minutes.sample(START + MINUTE)
    assert minute.minute == START.replace(second=0)
    assert (minute.generation_tokens, minute.running, minute.waiting, minute.referenced_blocks) == (
        600,
        7,
        2,
        5,
    )
    assert minute.device_adapters == 1 and sum(minute.ttft_buckets) == 4 and sum(minute.gap_buckets) == 12
    median, slowest = ttft_ms([minute], 50), ttft_ms([minute], 95)
    assert median is not None and 150 <= median <= 250 and slowest is not None and 2500 <= slowest <= 5000
    gap = gap_ms([minute, minute], 50)
    assert gap is not None and 10 <= gap <= 15
    answers(watched, generation_tokens=40)
    [restarted] = minutes.sample(START + 2 * MINUTE)
    assert restarted.generation_tokens == 0 and ttft_ms([restarted], 50) is None
    [after] = minutes.sample(START + 3 * MINUTE)
    assert after.generation_tokens == 40
    answers(watched, generation_tokens=900)
    minutes.sample(START + 6 * MINUTE)
    answers(watched, generation_tokens=950)
    minutes.sample(START + 6 * MINUTE + timedelta(seconds=9))
    [late] = minutes.sample(START + 7 * MINUTE)
    assert late.generation_tokens == 50


def test_a_minute_without_an_answer_is_missing() -> None:
    watched, silent = engine(running=1), engine()
    silent.last_stats = None
    minutes = EngineMinutes(EnginePool([watched, silent]), uuid4())
    minutes.sample(START)
    assert [each.number for each in minutes.sample(START + MINUTE)] == [0]
    watched.last_stats = None
    minutes.sample(START + MINUTE + timedelta(seconds=1))
    answers(silent, running=3)
    minutes.sample(START + 2 * MINUTE)
    assert [each.number for each in minutes.sample(START + 3 * MINUTE)] == [1]


def test_two_gateways_of_one_engine_are_one_minute() -> None:
    seen = []
    for ttft_s in (0.1, 0.3):
        shared = engine(generation_tokens=10, running=4)
        minutes = EngineMinutes(EnginePool([shared]), uuid4())
        minutes.sample(START)
        answers(shared, generation_tokens=70, running=4)
        minutes.sample(START + timedelta(seconds=9))
        minutes.observe(ended("0", ttft_s, [0.02]))
        seen += minutes.sample(START + MINUTE)
    joined = seen[0].joined(seen[1])
    assert joined.generation_tokens == 60 and joined.running == 4
    assert sum(joined.ttft_buckets) == 2 and sum(joined.gap_buckets) == 2
