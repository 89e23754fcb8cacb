"""Outcomes of the target table's rows from lines that were measured, that failed and that were not run."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tests.benchmarks.gpu.cases import kernel_cases
from tests.benchmarks.gpu.children import not_run
from tests.benchmarks.gpu.record import FIELDS
from tests.benchmarks.gpu.report import MAX_FAILURES, MAX_TIMES, report
from tests.benchmarks.gpu.targets import (
    COPY,
    NO_LINE,
    Row,
    by_device,
    over_base_case,
    rows,
    targets,
    tpot_case,
)


def line(case: str, stage: str = "time", **fields: Any) -> dict[str, Any]:
    return dict.fromkeys(FIELDS) | {"stage": stage, "case": case, "ok": True, "dry": False} | fields


def row_of(name: str, lines: Sequence[Mapping[str, Any]]) -> Row:
    return next(row for row in rows(lines) if name in row.name)


def every_line(**figures: Any) -> list[dict[str, Any]]:
    """One for each case of a kernel that the real run would time, and for what `test_jobs.py` finds among the jobs' lines."""
    kernels = [line(case.name, **figures) for case in kernel_cases(is_dry=False)]
    jobs = [line(case, **figures) for target in targets() if target.job for case in target.cases]
    return [*kernels, *jobs, *every_check()]


def every_check() -> list[dict[str, Any]]:
    """Each kernel of ours is right."""
    cases = (case.name for case in kernel_cases(is_dry=False) if not case.problem.is_peer)
    return [line(case, "check", rel_err=0.001) for case in cases]


def test_every_row_is_answered_by_cases_that_are_run() -> None:
    outcomes = {row.name: row.outcome for row in rows(every_line(value=1.0, us_p50=1.0, pct_copy=1.0))}
    assert [name for name, outcome in outcomes.items() if outcome not in ("ok", "MISS")] == []
    assert len(outcomes) == len(targets()) + 1


def test_every_row_of_the_whole_model_names_a_job() -> None:
    assert all(target.job for target in targets() if target.field == "value")


def copied(gbs: float, gpu: str = "") -> dict[str, Any]:
    return line(COPY, "probe", value=gbs, unit="GB/s") | {"hardware": {"gpu": gpu}}


@pytest.mark.parametrize(
    ("gbs", "milliseconds", "outcome"), [(4300.0, 4.9, "MISS"), (3000.0, 4.9, "ok"), (3000.0, 6.9, "MISS")]
)
def test_times_are_scaled_by_what_the_same_run_copied(gbs: float, milliseconds: float, outcome: str) -> None:
    found = row_of("batch 64, int4", [copied(gbs), line(tpot_case("int4", 64, "base"), value=milliseconds)])
    assert found.outcome == outcome
    assert found.required == f"at most 4.8 ms, here {4.8 * 4300 / gbs:.3g}"
    assert row_of("batch 64, int4", []).required == "at most 4.8 ms"


def test_ratios_and_the_link_to_the_host_are_not_scaled() -> None:
    for target in targets():
        assert target.is_scaled == (target.unit in ("us", "ms") and target.name != "swap of an 84 MB adapter")
    lines = [copied(2150.0), line("swap/ms", value=6.0)]
    assert row_of("swap of an 84 MB", lines).outcome == "MISS"


def test_each_gpu_has_a_table_of_its_own() -> None:
    case = tpot_case("int4", 64, "base")
    lines = [
        figure | {"hardware": {"gpu": gpu}}
        for gpu, gbs, value in (("H100", 3000.0, 6.0), ("H200", 4300.0, 5.0))
        for figure in (copied(gbs), line(case, value=value))
    ]
    outcomes = {gpu: row_of("batch 64, int4", its).outcome for gpu, its in by_device(lines).items()}
    assert outcomes == {"H100": "ok", "H200": "MISS"}
    titles = [text for text in report(lines) if text.startswith("targets")]
    assert titles == [f"targets on {gpu}: {len(targets()) + 1}" for gpu in ("H100", "H200")]


@pytest.mark.parametrize(("over", "outcome"), [(1.1, "ok"), (1.2, "MISS")])
def test_shares_of_base_are_of_tokens_per_second(over: float, outcome: str) -> None:
    row = row_of(
        "8 adapters over base decode, int4", [line(over_base_case("int4", 64, "8 adapters"), value=over)]
    )
    assert (row.outcome, row.found) == (outcome, f"measured {1 / over:.3g} x")


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
