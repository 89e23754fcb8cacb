"""Outcomes of the target table's rows from lines that were measured, that failed and that were not run."""

from typing import Any

import pytest
from tests.benchmarks.gpu.cases import kernel_cases
from tests.benchmarks.gpu.children import not_run
from tests.benchmarks.gpu.jobs import MODEL_JOBS
from tests.benchmarks.gpu.record import FIELDS
from tests.benchmarks.gpu.report import MAX_FAILURES, MAX_TIMES, report
from tests.benchmarks.gpu.sizes import REAL
from tests.benchmarks.gpu.targets import NO_LINE, Row, over_base_case, rows, targets, tpot_case

OTHERS = (
    *("swap/ms", "swap/share", "swap/p99 itl", "zipf/rate over resident", "peft/rate over peft"),
    *(
        "mixed/rate over decode",
        "json/rate over free",
        "logits/error over transformers",
        "graphs/equal tokens",
    ),
)


def line(case: str, stage: str = "time", **fields: Any) -> dict[str, Any]:
    return dict.fromkeys(FIELDS) | {"stage": stage, "case": case, "ok": True, "dry": False} | fields


def row_of(name: str, lines: list[dict[str, Any]]) -> Row:
    return next(row for row in rows(lines) if name in row.name)


def every_line(**figures: Any) -> list[dict[str, Any]]:
    """One for each case the real run would time."""
    kernels = [line(case.name, **figures) for case in kernel_cases(is_dry=False)]
    loads = ("base", "all-base", "one", "distinct", "zipf", "distinct 8-bit", "zipf 8-bit")
    model = [
        line(make(scheme, count, load), **figures)
        for make in (tpot_case, over_base_case)
        for scheme in ("none", "int8", "int4")
        for count in REAL.rows
        for load in loads
    ]
    shares = [line(f"share of copy/llama-3-8b/{scheme}/b1", **figures) for scheme in ("none", "int8", "int4")]
    others = [line(case, **figures) for case in OTHERS]
    return [*kernels, *model, *shares, *others, *every_check()]


def every_check() -> list[dict[str, Any]]:
    """Each kernel of ours is right."""
    cases = (case.name for case in kernel_cases(is_dry=False) if not case.problem.is_peer)
    return [line(case, "check", rel_err=0.001) for case in cases]


def test_every_row_is_answered_by_cases_that_are_run() -> None:
    outcomes = {row.name: row.outcome for row in rows(every_line(value=1.0, us_p50=1.0, pct_copy=1.0))}
    assert [name for name, outcome in outcomes.items() if outcome not in ("ok", "MISS")] == []
    assert len(outcomes) == len(targets()) + 1


def test_every_row_of_the_whole_model_names_a_job_that_exists() -> None:
    names = {job.name for job in MODEL_JOBS}
    measured = [target for target in targets() if target.field == "value"]
    assert measured and all(target.job in names for target in measured)


@pytest.mark.parametrize(("swap", "rate", "outcome"), [(4.0, 0.95, "ok"), (6.0, 0.85, "MISS")])
def test_limits_lie_on_their_side(swap: float, rate: float, outcome: str) -> None:
    lines = [line("swap/ms", value=swap), line("zipf/rate over resident", value=rate)]
    for name in ("swap of an 84 MB", "1,000 registered"):
        assert row_of(name, lines).outcome == outcome


def test_the_worst_of_several_counts() -> None:
    lines = [
        line(over_base_case("none", count, "one"), value=value) for count, value in ((1, 1.05), (32, 1.12))
    ]
    assert row_of("one adapter, batch 1-32, none", lines).found == "measured 12 %"


def test_zipf_is_measured_over_even_rows() -> None:
    lines = [
        line(over_base_case("int4", 64, load), value=value)
        for load, value in (("zipf", 1.2), ("distinct", 1.5))
    ]
    row = row_of("64 distinct, int4, Zipf", lines)
    assert (row.outcome, row.found) == ("ok", "measured 0.8 x")


def test_a_row_without_figures_says_why() -> None:
    case, dry = "swap/ms", line("swap/ms", value=1.0) | {"dry": True}
    for lines, outcome, found in (
        ([], "not run", NO_LINE),
        ([dry], "not run", NO_LINE),
        ([line(case, ok=False, error="wrong")], "failed", "swap/ms: wrong"),
        ([line("swap", ok=False, error="failed: X")], "failed", "swap: failed: X"),
        ([line("swap") | not_run("swap", "no time")], "not run", "swap: not run: no time"),
    ):
        row = row_of("swap of an 84 MB", lines)
        assert (row.outcome, row.found) == (outcome, found)


def test_a_later_run_of_a_case_counts() -> None:
    first, second = line("swap/ms", value=9.0), line("swap/ms", value=4.0)
    assert row_of("swap of an 84 MB", [first, second]).outcome == "ok"
    assert row_of("swap of an 84 MB", [second, line("swap/ms", ok=False, error="x")]).outcome == "ok"


@pytest.mark.parametrize(("ok", "outcome"), [(True, "ok"), (False, "MISS")])
def test_one_wrong_kernel_is_enough(ok: bool, outcome: str) -> None:
    first, *others = every_check()
    assert row_of("every kernel", [*others, first | {"ok": ok, "rel_err": 0.5}]).outcome == outcome


def test_kernels_that_were_not_checked_are_not_right() -> None:
    checks = every_check()
    last, count = checks.pop(), len(checks)
    died = line(last["case"], "run", ok=False, error="the process ended with -11")
    late = line(last["case"], "run") | not_run(last["case"], "no time was left")
    for lines, outcome in ((checks, "not run"), ([*checks, died], "failed"), ([*checks, late], "not run")):
        row = row_of("every kernel", lines)
        assert row.outcome == outcome and row.found.startswith(f"{count} of {count + 1} cases, 0 wrong")


def test_names_are_unique() -> None:
    for is_dry in (False, True):
        names = [case.name for case in kernel_cases(is_dry=is_dry)]
        assert len(names) == len(set(names))


def test_failures_push_neither_times_nor_the_table_out() -> None:
    failed = [line(f"f{index}", ok=False, error="x\n" * 500) for index in range(500)]
    timed = [line(f"t{index}", value=1.0, unit="ms") for index in range(500)]
    texts = report([*failed, *timed])
    assert sum(text.startswith("time t") for text in texts) == MAX_TIMES
    assert sum(text.startswith("time f") for text in texts) == MAX_FAILURES
    assert "failed: 500" in texts and f"... {500 - MAX_FAILURES} more in the file" in texts
    assert texts.index(f"targets: {len(targets()) + 1}") == len(texts) - len(targets()) - 3
