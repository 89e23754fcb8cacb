"""The measurement of the gateway: both commits of a run are measured in turn, and a run has figures for each model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.benchmarks import gateway
from tests.benchmarks.checkout import CHECKOUT
from tests.benchmarks.gateway import AT_MOST, MODELS, GatewayShape, measure_checkout, measure_gateway


def test_both_commits_are_measured_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured: list[Path] = []

    @contextmanager
    def earlier(commit: str | None) -> Iterator[Path]:
        assert commit == "v1"
        yield tmp_path

    def measure(checkout: Path, shape: GatewayShape) -> dict[str, dict[str, float]]:
        measured.append(checkout)
        cpu_ms = 1.0 if checkout == CHECKOUT else 4.0
        return {name: {"cpu_ms": cpu_ms, "p50_ms": 2.0, "p99_ms": 3.0} for name in MODELS}

    monkeypatch.setattr(gateway, "earlier_checkout", earlier)
    monkeypatch.setattr(gateway, "measure_checkout", measure)
    report = measure_gateway(GatewayShape(rounds=2), "v1")
    assert measured == [tmp_path, CHECKOUT] * 2
    for case in report.cases:
        assert (case.figure["before_cpu_ms"], case.figure["cpu_ms"]) == (4.0, 1.0)
    assert [(ratio.value, ratio.required) for ratio in report.ratios] == [(0.25, AT_MOST)] * 2


@pytest.mark.long
def test_a_run_has_figures_for_each_model() -> None:
    figures = measure_checkout(CHECKOUT, GatewayShape(requests=20, connections=2, rounds=1))
    assert {*figures} == {*MODELS}
    for each in figures.values():
        assert 0 < each["p50_ms"] <= each["p99_ms"] and each["cpu_ms"] > 0
