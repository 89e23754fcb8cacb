"""Kernels alone, measured on a tiny layer: every problem of a job, with its share of memcpy bandwidth of the same run."""

import pytest
from tests.benchmarks.kernels import clock
from tests.benchmarks.kernels.shapes import LLAMA_3_8B, TINY
from tests.benchmarks.process import (
    AttentionShape,
    GemmShape,
    KernelJob,
    LoraSizes,
    measure_kernels,
    problems_of,
)

from loraplex.platform.bench import lora

JOBS = {
    "attention": KernelJob(
        "attention", "cpu", "float32", "tiny", attention=AttentionShape("float32", [1, 2], [20, 40], 8)
    ),
    "gemm": KernelJob("gemm", "cpu", "float32", "tiny", gemm=GemmShape(["int8", "torch fp8"], [1])),
    "lora": KernelJob("lora", "cpu", "float32", "tiny", lora=LoraSizes([(2, 2)], 4)),
}


@pytest.mark.parametrize(("name", "measured"), [("attention", 6), ("gemm", 4), ("lora", 2)])
def test_every_problem_is_measured(name: str, measured: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "MEMCPY_BYTES", 1 << 20)
    monkeypatch.setattr(clock, "COLD_BYTES", 1 << 10)
    monkeypatch.setattr(clock, "CPU_SECONDS", 0.0)
    monkeypatch.setattr("tests.benchmarks.process.PRODUCT_SIDE", {"cpu": 64})
    report = measure_kernels(JOBS[name])
    ceilings, *cases = report.cases
    assert len(cases) == measured
    for case in cases:
        figure = case.figure
        share = 100 * figure["bytes"] / figure["us_p50"] / 1e3 / ceilings.figure["gbs"]
        assert figure["pct_copy"] == pytest.approx(share)
    assert any("needs CUDA" in note for note in report.notes) is (name == "gemm")


def test_bytes_are_those_of_the_worksheet() -> None:
    """The figures of the issue's table, by hand: 18.9 MB of a pair, 168 MB of a layer, 2.1 GB of an 8k decode."""
    lora = KernelJob("lora", "cpu", "bfloat16", LLAMA_3_8B.name, lora=LoraSizes([(64, 64)], 16))
    pair, layer = problems_of(lora, LLAMA_3_8B)
    assert pair.bytes == 2 * (64 * 16 * (4096 + 4096) + 64 * 3 * 4096)
    adapters = 2 * 64 * 16 * (3 * 4096 + 6144 + 2 * 4096 + 2 * 4096 + 28672 + 14336 + 4096)
    assert adapters == pytest.approx(168e6, rel=0.01) and layer.bytes > adapters
    sizes = AttentionShape("bfloat16", [64], [8192], 0)
    attention = KernelJob("attention", "cpu", "bfloat16", LLAMA_3_8B.name, attention=sizes)
    (decode,) = problems_of(attention, LLAMA_3_8B)
    assert decode.bytes == pytest.approx(2.15e9, rel=0.01)


def test_sets_hold_more_than_a_cache_within_reason() -> None:
    assert clock.sets_of(18 << 20) == 29
    assert clock.sets_of(2 << 30) == 1
    assert clock.sets_of(1000) == clock.MAX_SETS


def test_a_layers_sites_fit_its_products() -> None:
    for name, (outputs, inputs) in TINY.products().items():
        assert TINY.sites()[name] == (inputs, TINY.sites()[name][1])
        assert sum(TINY.sites()[name][1]) == outputs
