"""Statistics of a load and their field names."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.platform.bench.client import Completion, CompletionRequest
from loraplex.platform.bench.latency_metrics import parse_goodput, percentile, serving_metrics
from loraplex.platform.bench.load import LoadResult
from loraplex.platform.startup_errors import SettingsError

FIELDS = {
    *("completed", "cancelled", "failed", "duration", "total_input_tokens", "total_output_tokens"),
    *("total_cached_tokens", "request_throughput", "output_throughput", "total_token_throughput"),
    *(
        f"{kind}_{name}_ms"
        for kind in ("mean", "median", "std", "p50", "p95", "p99")
        for name in ("ttft", "tpot", "itl", "e2el")
    ),
}


def completion(
    *times: float, tokens: int | None = None, complete: bool = True, error: str | None = None
) -> Completion:
    return Completion(
        text="x" * len(times),
        token_times=times,
        prompt_tokens=10,
        output_tokens=len(times) if tokens is None else tokens,
        cached_tokens=0,
        complete=complete,
        error=error,
        latency=max(times, default=0.0),
    )


def result(*completions: Completion, duration: float = 2.0) -> LoadResult:
    requests = tuple(CompletionRequest("m", "p", 3, "k") for _ in completions)
    return LoadResult(requests, completions, duration)


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50),
    st.floats(0, 100),
)
def test_percentile_is_numpys(values: list[float], share: float) -> None:
    assert percentile(values, share) == pytest.approx(float(np.percentile(values, share)), abs=1e-6)


def test_rates_and_times() -> None:
    figures = serving_metrics(result(completion(0.1, 0.2, 0.4), completion(0.3, 0.4, 0.5)))
    assert set(figures) == FIELDS
    assert figures["request_throughput"] == 1.0
    assert figures["output_throughput"] == 3.0
    assert figures["mean_ttft_ms"] == pytest.approx(200)
    assert figures["median_tpot_ms"] == pytest.approx((150 + 100) / 2)
    assert figures["p99_itl_ms"] == pytest.approx(197)
    assert figures["mean_e2el_ms"] == pytest.approx(450)


def test_time_per_token_counts_tokens_not_pieces_of_text() -> None:
    assert serving_metrics(result(completion(0.0, 1.0, tokens=5)))["mean_tpot_ms"] == pytest.approx(250)


def test_failed_and_cancelled_requests_give_no_figures() -> None:
    figures = serving_metrics(
        result(
            completion(0.1, 0.2),
            completion(9.0, complete=False),
            completion(complete=False, error="HTTP 503"),
        )
    )
    assert (figures["completed"], figures["cancelled"], figures["failed"]) == (1, 1, 1)
    assert figures["mean_ttft_ms"] == pytest.approx(100)


def test_goodput_counts_requests_within_every_objective() -> None:
    objectives = parse_goodput("ttft:150, e2el:450")
    figures = serving_metrics(
        result(completion(0.1, 0.4), completion(0.1, 0.5), completion(0.2, 0.3)), objectives
    )
    assert figures["request_goodput"] == 0.5


@pytest.mark.parametrize("text", ["ttft", "ttft:fast", "speed:3", "ttft:1,,"])
def test_a_wrong_objective_is_named(text: str) -> None:
    with pytest.raises(SettingsError, match="allowed is METRIC:MS"):
        parse_goodput(text)
