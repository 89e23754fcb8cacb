"""The cost of adapters, measured on a tiny model."""

from pathlib import Path

import pytest

from loraplex.platform.bench import lora
from loraplex.platform.bench.lora import LoraShape, measure_lora


def test_every_shape_is_measured(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "MEMCPY_BYTES", 1 << 20)
    shapes = [LoraShape(4, 2, rank=4, steps=5), LoraShape(1, 1, rank=4, steps=5)]
    report = measure_lora(str(tiny_model), "float32", "cpu", shapes)
    bytes_of_one = 2 * 4 * 4 * sum((32 + 32, 32 + 16, 32 + 16, 32 + 32, 32 + 48, 32 + 48, 48 + 32))
    assert [case.figure["adapter_bytes"] for case in report.cases] == [2 * bytes_of_one, bytes_of_one]
    assert all(case.figure["base_step_ms"] > 0 for case in report.cases)
    strict, generous, _ = report.ratios[:3]
    assert strict.value == pytest.approx(2 * generous.value)
