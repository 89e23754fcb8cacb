"""Verdicts on the issue's table from lines that were measured."""

from typing import Any

import pytest
from tests.benchmarks.gpu.cases import kernel_cases
from tests.benchmarks.gpu.demands import Lines, demands, over_base_case, tpot_case, verdicts
from tests.benchmarks.gpu.jobs import REAL


def line(case: str, **figures: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("value", "us_p50", "pct_copy"))
    return {"stage": "time", "case": case, "ok": True, "dry": False, **empty, **figures}


def verdict_of(name: str, lines: list[dict[str, Any]]) -> str:
    return next(text for text in verdicts(lines) if name in text)


def every_line(figures: dict[str, float]) -> list[dict[str, Any]]:
    """One for each case the real run would time."""
    kernels = [line(case.name, **figures) for case in kernel_cases(is_dry=False)]
    loads = ("base", "all-base", "one", "distinct", "distinct 8-bit")
    model = [
        line(make(scheme, rows, load), **figures)
        for make in (tpot_case, over_base_case)
        for scheme in ("none", "int8", "int4")
        for rows in REAL.rows
        for load in loads
    ]
    shares = [line(f"share of copy/llama-3-8b/{scheme}/b1", **figures) for scheme in ("none", "int8", "int4")]
    others = ("swap/ms", "swap/share", "swap/p99 itl", "zipf/rate over resident", "peft/rate over peft")
    check = {"stage": "check", "case": "any", "ok": True, "dry": False}
    return [*kernels, *model, *shares, *(line(case, **figures) for case in others), check]


def test_every_row_is_answered_by_cases_that_are_run() -> None:
    known = Lines(every_line({"value": 1.0, "us_p50": 1.0, "pct_copy": 1.0}))
    assert [demand.name for demand in demands() if demand.figure(known) is None] == []


def test_limits_are_judged_on_their_side() -> None:
    good = [line("swap/ms", value=4.0), line("zipf/rate over resident", value=0.95)]
    bad = [line("swap/ms", value=6.0), line("zipf/rate over resident", value=0.85)]
    for name in ("swap of an 84 MB", "1,000 registered"):
        assert verdict_of(name, good).startswith("ok")
        assert verdict_of(name, bad).startswith("MISS")


def test_the_worst_of_several_counts() -> None:
    lines = [
        line(over_base_case("none", rows, "one"), value=value) for rows, value in ((1, 1.05), (32, 1.12))
    ]
    assert verdict_of("one adapter, batch 1-32, none", lines).endswith("measured 12")


def test_what_is_dry_failed_or_missing_answers_nothing() -> None:
    dry = line("swap/ms", value=1.0) | {"dry": True}
    failed = line("swap/ms", value=1.0) | {"ok": False}
    for lines in ([], [dry], [failed]):
        assert verdict_of("swap of an 84 MB", lines).startswith("open")


@pytest.mark.parametrize(("ok", "begins"), [(True, "ok"), (False, "MISS")])
def test_one_wrong_kernel_is_enough(ok: bool, begins: str) -> None:
    lines = [{"stage": "check", "case": case, "ok": case == "a" or ok, "dry": False} for case in "ab"]
    assert verdict_of("kernels against fp32", lines).startswith(begins)


def test_names_are_unique() -> None:
    names = [case.name for case in kernel_cases(is_dry=False)]
    assert len(names) == len(set(names))
