"""The measurement of bodies: every case has a time, and both commits of a run are measured in turn."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.benchmarks import bodies
from tests.benchmarks.bodies import AT_MOST, BodiesShape, measure, measure_bodies
from tests.benchmarks.checkout import CHECKOUT

from loraplex.platform.bench.report import BenchFailed


def test_every_case_has_a_time() -> None:
    times = measure(repeats=1)
    assert len(times) == 13 and min(times.values()) > 0


def test_both_commits_are_measured_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured: list[Path] = []

    @contextmanager
    def earlier(commit: str | None) -> Iterator[Path]:
        assert commit == "v1"
        yield tmp_path

    def child(checkout: Path, repeats: int) -> dict[str, float]:
        measured.append(checkout)
        return {"case": 2.0 if checkout == CHECKOUT else 1.0}

    monkeypatch.setattr(bodies, "earlier_checkout", earlier)
    monkeypatch.setattr(bodies, "run_child", child)
    report = measure_bodies(BodiesShape(rounds=2), "v1")
    assert measured == [tmp_path, CHECKOUT] * 2
    assert [case.figure for case in report.cases] == [{"after_us": 2.0, "before_us": 1.0}]
    [ratio] = report.ratios
    assert (ratio.value, ratio.required, ratio.holds) == (2.0, AT_MOST, False)


def test_a_commit_that_does_not_exist_is_named() -> None:
    with pytest.raises(BenchFailed, match="no-such-commit"):
        measure_bodies(BodiesShape(), "no-such-commit")
