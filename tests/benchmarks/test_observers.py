"""What watching costs is measured in turn with what it is compared to, with the collector outside of the gateway."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.benchmarks import observers
from tests.benchmarks.gateway import Figures, GatewayShape, Serving
from tests.benchmarks.observers import LINES, METRICS, NOTHING, TRACES, measure_observers

from loraplex.platform.observability.access_log import log_request


def test_kinds_are_measured_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[str, ...]] = []

    @contextmanager
    def gateway(checkout: Path, module: str, *arguments: str) -> Iterator[Serving]:
        served.append(arguments)
        yield Serving(1, 1, "key")

    async def measured(serving: Serving, model: str, shape: GatewayShape) -> Figures:
        return {"cpu_ms": float(1 + len(served[-1])), "p50_ms": 2.0, "p99_ms": 3.0}

    monkeypatch.setattr(observers, "served", gateway)
    monkeypatch.setattr(observers, "measure", measured)
    report = measure_observers(GatewayShape(rounds=2))
    assert [len(arguments) for arguments in served] == [0, 1, 2, 3] * 2
    assert served[3][-1].startswith("http://127.0.0.1:")
    assert [case.name for case in report.cases] == [NOTHING, LINES, METRICS, TRACES]
    assert [case.figure["added_cpu_us"] for case in report.cases] == [0.0, 1000.0, 2000.0, 3000.0]
    assert [ratio.value for ratio in report.ratios] == [2.0, 1.5, pytest.approx(4 / 3)]


def test_each_kind_watches_more_than_the_one_before() -> None:
    found = [observers.observers(arguments) for arguments in ([], ["lines"], ["lines", "metrics"])]
    assert [len(each) for each in found] == [0, 1, 3] and found[1] == [log_request]
