"""The search for a rate, its objectives, and the interval of a cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.platform.bench.load import LoadResult
from loraplex.platform.bench.rate_search import (
    MAX_RATE,
    MIN_RATE,
    PRECISION,
    Objective,
    Probe,
    parse_slo,
    search_rate,
)
from loraplex.platform.bench.token_cost import half_interval
from loraplex.platform.startup_errors import SettingsError

TTFT = Objective("ttft", 95, 0.5)


def probe(rate: float, capacity: float) -> Probe:
    return Probe(rate, {}, 0, () if rate <= capacity else (TTFT,), LoadResult((), (), 1.0))


@given(st.floats(MIN_RATE, MAX_RATE / 2), st.floats(0.1, 100))
async def test_the_search_encloses_the_capacity(capacity: float, start: float) -> None:
    async def of_rate(rate: float) -> Probe:
        return probe(rate, capacity)

    held, broken = await search_rate(of_rate, start)
    if held is None:
        assert broken is not None and broken.rate < 2 * MIN_RATE
        return
    assert broken is not None
    assert held.rate <= capacity < broken.rate <= held.rate * PRECISION


async def test_a_server_that_never_breaks_ends_the_search() -> None:
    async def holds(rate: float) -> Probe:
        return probe(rate, rate)

    held, broken = await search_rate(holds, 1.0)
    assert held is not None and held.rate == MAX_RATE and broken is None


def test_objectives_are_parsed_to_seconds() -> None:
    assert parse_slo("ttft_p95=500ms, e2el_p50=2.5s") == (TTFT, Objective("e2el", 50, 2.5))


@pytest.mark.parametrize(
    "text", ["", "ttft=5ms", "ttft_p49=5ms", "ttft_p95=5", "speed_p95=5ms", "itl_p95=0ms"]
)
def test_a_wrong_objective_is_named(text: str) -> None:
    with pytest.raises(SettingsError, match="--slo .*allowed is METRIC_PERCENTILE=TIME"):
        parse_slo(text)


def test_a_phase_counts_for_the_metrics_that_contain_it() -> None:
    for metric, counted in (("ttft", {"queue"}), ("itl", {"decode"}), ("e2el", {"queue", "decode"})):
        objective = Objective(metric, 95, 1.0)
        assert {phase for phase in ("queue", "decode") if objective.counts(phase)} == counted


def test_the_interval_is_students() -> None:
    assert half_interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2.776 * (2.5**0.5) / 5**0.5)
