"""Decode steps against reading and beside a busy process, measured on a tiny model."""

from pathlib import Path

import pytest
from tests.benchmarks.decode import DecodeJob, measure_decode


@pytest.mark.long
def test_every_format_is_measured_at_every_row_count(tiny_model: Path) -> None:
    job = DecodeJob(str(tiny_model), "bfloat16", ["none", "int8"], [1, 2], steps=2, repeats=1)
    report = measure_decode(job)
    assert [case.shape["quantization"] for case in report.cases] == ["none", "none", "int8", "int8"]
    for case in report.cases:
        figure = case.figure
        assert figure["step_over_read"] == pytest.approx(figure["step_ms"] / figure["read_ms"])
        assert figure["busy_share"] == pytest.approx(figure["step_ms"] / figure["busy_step_ms"])
    assert [ratio.required for ratio in report.ratios] == [1.5, 0.34, None, None, None, 0.34, None, None]
