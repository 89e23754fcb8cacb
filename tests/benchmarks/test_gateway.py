"""The measurement of the gateway: both commits of a run are measured in turn, and a run has figures for each model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.benchmarks import gateway
from tests.benchmarks.checkout import CHECKOUT
from tests.benchmarks.gateway import AT_MOST, MODELS, Figures, GatewayShape, Serving, measure_gateway


def test_both_commits_are_measured_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured: list[str] = []

    @contextmanager
    def earlier(commit: str | None) -> Iterator[Path]:
        assert commit == "v1"
        yield tmp_path

    @contextmanager
    def serving(checkout: Path) -> Iterator[Serving]:
        yield Serving(1, 1, "after" if checkout == CHECKOUT else "before")

    async def measure(gateway: Serving, model: str, shape: GatewayShape, warm_up: int) -> Figures:
        measured.append(gateway.key)
        cpu_ms = len(measured) if gateway.key == "after" else 4.0
        return {"cpu_ms": cpu_ms, "p50_ms": 2.0, "p99_ms": 3.0}

    monkeypatch.setattr(gateway, "earlier_checkout", earlier)
    monkeypatch.setattr(gateway, "served", serving)
    monkeypatch.setattr(gateway, "measure", measure)
    report = measure_gateway(GatewayShape(rounds=2), "v1")
    assert measured == ["before", "after", "after", "before"] * len(MODELS)
    assert [case.figure["before_cpu_ms"] for case in report.cases] == [4.0] * len(MODELS)
    assert [case.figure["cpu_ms"] for case in report.cases] == [2.5, 6.5]
    assert [(ratio.value, ratio.required) for ratio in report.ratios] == [(0.625, AT_MOST), (1.625, AT_MOST)]


@pytest.mark.long
def test_a_run_has_figures_for_each_model() -> None:
    report = measure_gateway(GatewayShape(requests=20, connections=2, rounds=1), None)
    assert [case.name for case in report.cases] == [*MODELS]
    for case in report.cases:
        assert 0 < case.figure["p50_ms"] <= case.figure["p99_ms"] and case.figure["cpu_ms"] > 0
