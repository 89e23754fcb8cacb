"""Quantized models against the unquantized one, measured on a tiny model."""

from pathlib import Path

import pytest
from tests.benchmarks.quantization import measure_quantization

from loraplex.platform.bench.report import BenchFailed


@pytest.mark.long
def test_every_scheme_is_measured_at_every_row_count(tiny_model: Path) -> None:
    report = measure_quantization(str(tiny_model), "bfloat16", "cpu", ["int8", "int4"], [1, 2], steps=3)
    assert [case.name for case in report.cases] == [
        f"{scheme}, {what}"
        for scheme in ("int8", "int4")
        for what in ("decode of 1", "decode of 2", "prompt of 256")
    ]
    for case, ratio in zip(report.cases, report.ratios, strict=True):
        assert ratio.value == pytest.approx(case.figure["base_ms"] / case.figure["quantized_ms"])
        assert 0 < case.figure["quantized_weight_mib"] < case.figure["base_weight_mib"]
    assert [ratio.required for ratio in report.ratios] == [1.3, None, None, None, None, None]


def test_none_is_no_scheme_to_compare(tiny_model: Path) -> None:
    with pytest.raises(BenchFailed, match="none is what the others are compared with"):
        measure_quantization(str(tiny_model), "bfloat16", "cpu", ["none"], [1], steps=1)
