"""`bench determinism` on a tiny model: every axis occurs, `deterministic` changes nothing, and a change is counted."""

from pathlib import Path

import pytest

from loraplex.platform.bench.determinism import AXES, DeterminismJob, compare, measure_determinism
from loraplex.platform.bench.report import BenchFailed


def job(model: Path, output_len: int = 20) -> DeterminismJob:
    return DeterminismJob(str(model), "float32", "cpu", 4, 70, output_len, 2, 4)


def test_every_axis_is_measured_in_both_modes(tiny_model: Path) -> None:
    report = measure_determinism(job(tiny_model))
    modes = ("default, base", "default, 2 adapters", "deterministic, base", "deterministic, 2 adapters")
    assert [case.name for case in report.cases] == [f"{mode}: {axis}" for mode in modes for axis in AXES]
    assert len(report.ratios) == 2 * len(AXES) and all(ratio.holds for ratio in report.ratios)
    assert all(case.figure["tokens"] == 80 for case in report.cases[10:])
    assert all(str(tiny_model) not in str(case.shape) for case in report.cases)


def test_an_axis_that_does_not_occur_is_an_error(tiny_model: Path) -> None:
    """Responses of one token end before blocks run out."""
    with pytest.raises(BenchFailed, match="preemptions; give more"):
        measure_determinism(job(tiny_model, output_len=1))


def test_changes_are_counted_until_a_text_leaves_the_other() -> None:
    expected = {"0": [(5, -1.0), (6, -2.0), (7, -3.0), (8, -1.0)], "1": [(5, -1.0)]}
    found = {"0": [(5, -1.0), (6, -2.5), (9, -3.0), (9, -9.0)], "1": [(5, -1.0)]}
    assert compare(expected, found) == {
        "tokens": 4,
        "divergences_per_1000": 250.0,
        "changed_logprobs_per_1000": 250.0,
        "max_logprob_difference": 0.5,
    }
