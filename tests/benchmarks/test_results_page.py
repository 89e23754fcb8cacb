"""The page of results: newest runs, escaped texts, points under the roof, and files that are none."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks.results_page import read_lines, render
from tests.benchmarks.roofline import BOTTOM, HEIGHT, LEFT, WIDTH, roofline_of

from loraplex.platform.bench.report import RESULTS, BenchFailed, checkout_root

HARDWARE = {"cpu": "Some CPU", "cores": 2, "memory_bytes": 1, "gpu": None}
CEILING = {"gbs": 10.0, "gflops": 100.0}


def line(case: str, figure: dict[str, Any], **fields: Any) -> dict[str, Any]:
    head = {"benchmark": "gemm", "at": "2026-11-21T10:00:00", "commit": "a1", "hardware": HARDWARE}
    return head | {"versions": {"torch": "2.13"}, "case": case, "shape": {}, "figure": figure} | fields


def kernel(us: float, size: int, flops: int) -> dict[str, Any]:
    return {"us_p50": us, "bytes": size, "flops": flops, "pct_copy": 50.0}


def written(folder: Path, *lines: dict[str, Any]) -> Path:
    (folder / "some.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return folder


def test_a_page_stands_alone(tmp_path: Path) -> None:
    lines = [line("ceilings of this run", CEILING), line("gemm/int4", kernel(1.0, 1000, 2000))]
    lines.append(line("faster", {"ratio": 1.5, "kind": "at least", "required": 1.3, "holds": True}))
    text = render(read_lines(written(tmp_path, *lines)))
    assert "<svg" in text and "<circle" in text and "gemm/int4: 1 us, 50 % of memcpy bandwidth" in text
    assert "at least 1.3" in text and '<span class="holds">yes</span>' in text
    assert "Some CPU, 2 cores" in text and "torch 2.13" in text
    assert not re.search(r"(?:src|href)=|@import|url\(", text)


def test_texts_are_escaped(tmp_path: Path) -> None:
    text = render(read_lines(written(tmp_path, line("<script>alert(1)</script>", {"figure": "<b>"}))))
    assert "<script>" not in text and "<b>" not in text
    assert "&lt;script&gt;" in text


def test_the_newest_commit_of_a_benchmark_counts_and_dry_lines_never(tmp_path: Path) -> None:
    old = line("old case", {"us_p50": 1.0}, commit="a0", at="2026-11-20T10:00:00")
    dry = line("dry case", {"us_p50": 1.0}, dry=True, at="2026-11-22T10:00:00")
    other = line("elsewhere", {"us_p50": 1.0}, commit="a0", hardware=HARDWARE | {"gpu": "H200"})
    text = render(read_lines(written(tmp_path, old, line("new case", {"us_p50": 2.0}), dry, other)))
    assert "new case" in text and "elsewhere" in text
    assert "old case" not in text and "dry case" not in text


def test_lines_of_the_gpus_runner_are_read(tmp_path: Path) -> None:
    fields = {"stage": "time", "ok": True, "us_p50": 8.0, "pct_copy": 60.0, "bytes": 10**7, "flops": 10**8}
    probes = [
        {"case": "probe/copy, read and written", "stage": "probe", "value": 4300.0, "unit": "GB/s"},
        {"case": "probe/product of 8192", "stage": "probe", "value": 790.0, "unit": "TFLOP/s"},
    ]
    lines = [line("lora pair/pages", {}, **fields), *(line("probe", {}) | probe for probe in probes)]
    for one in lines:
        del one["figure"]
    text = render(read_lines(written(tmp_path, *lines)))
    assert "lora pair/pages: 8 us, 60 % of memcpy bandwidth" in text


@pytest.mark.parametrize("text", ["no json", "[1]", '{"case": "alone"}'])
def test_a_foreign_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.jsonl").write_text(text + "\n")
    with pytest.raises(BenchFailed, match=r"odd.jsonl, line 1"):
        read_lines(tmp_path)


def test_points_lie_within_and_under_the_roof() -> None:
    figures: dict[str, dict[str, Any]] = {"ceilings of this run": CEILING}
    figures |= {f"gemm/{index}": kernel(10.0**index, 10**5, 10 ** (4 + index)) for index in range(1, 4)}
    plot = roofline_of(figures)
    assert plot is not None and plot.groups == ("gemm",)
    for point in plot.points:
        assert LEFT <= point.x <= WIDTH and 0 <= point.y <= HEIGHT - BOTTOM
    corners = [tuple(map(float, corner.split(","))) for corner in plot.roof.split()]
    assert corners[0][1] > corners[1][1] == corners[2][1] and corners[0][0] < corners[1][0] < corners[2][0]
    assert min(point.y for point in plot.points) >= corners[1][1]


def test_without_ceilings_there_is_no_roofline() -> None:
    assert roofline_of({"gemm/one": kernel(1.0, 10, 10)}) is None


def test_the_results_of_this_repository_make_a_page() -> None:
    root = checkout_root()
    assert root is not None
    assert "<h2>speed</h2>" in render(read_lines(root / RESULTS))
