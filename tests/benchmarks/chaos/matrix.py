"""The chaos matrix: every fault in every component, one after the other, as one report.

Invariant: a cell that cannot run is in the report with the reason. After a cell that did not end clean, the next one gets a new
installation.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
from tests.benchmarks.chaos.cell import TIMEOUT_S, CellResult, run_cell
from tests.benchmarks.chaos.clocks import missing_for_clocks
from tests.benchmarks.chaos.world import World, WorldPlan, opened_world

from loraplex.platform.bench.report import Case, Ratio, Report

COLUMNS: Final = (
    "requests",
    "errors",
    "unexpected_ends",
    "given_up",
    "recovery_s",
    "drift_pico",
    "missing",
    "duplicated",
    "quotas_exact",
    "ready_refused_s",
    "unready_served_s",
)
CLOCK, DISK = "clock-jump", "disk-full"
CUT_BY_DEATH: Final = ("kill", "gateway")
"""The only cell whose streams may end without an error: its process is gone."""


class ChaosJob(msgspec.Struct, frozen=True, kw_only=True):
    """The cells to run; a fault lasts `seconds`. `model`: a folder; `scripted`: the engine plays a script instead."""

    model: str
    faults: tuple[str, ...]
    components: tuple[str, ...]
    seconds: float
    scripted: bool
    may_mount: bool = False


class Installations:
    """One installation at a time, replaced on demand."""

    def __init__(self, plan: WorldPlan, progress: Callable[[str], None]) -> None:
        self._plan, self._progress = plan, progress
        self._stack = AsyncExitStack()
        self._world: World | None = None

    async def world(self) -> World:
        """The running installation, started if there is none."""
        if self._world is None:
            self._world = await self._stack.enter_async_context(opened_world(self._plan, self._progress))
        return self._world

    async def discard(self) -> None:
        """End the installation."""
        self._world = None
        await self._stack.aclose()


async def measure_chaos(job: ChaosJob, progress: Callable[[str], None]) -> Report:
    """Run the cells of the job. Raises `BenchFailed` when no installation starts."""
    report, results = Report("chaos", COLUMNS), list[tuple[str, CellResult]]()
    for clocked in (False, True):
        faults = [fault for fault in job.faults if (fault == CLOCK) == clocked and not skipped(job, fault)]
        plan = WorldPlan(model=Path(job.model), scripted=job.scripted, disks=job.may_mount, clocks=clocked)
        async for name, result in run_cells(plan, job, faults, progress):
            results.append((name, result))
            report.cases.append(Case(name, shape_of(job), figure_of(result)))
            report.notes += [f"{name}: {note}" for note in notes_of(result)]
    for fault in job.faults:
        if reason := skipped(job, fault):
            report.notes.append(f"{fault}: skipped: {reason}")
            report.cases += [
                Case(f"{fault} {component}", shape_of(job), {"skipped": reason})
                for component in job.components
            ]
    report.ratios += ratios_of(results)
    return report


async def run_cells(
    plan: WorldPlan, job: ChaosJob, faults: Sequence[str], progress: Callable[[str], None]
) -> AsyncIterator[tuple[str, CellResult]]:
    """Run each of `faults` in each component of the job."""
    installations = Installations(plan, progress)
    try:
        for fault in faults:
            for component in job.components:
                world = await installations.world()
                began = time.monotonic()
                result = await run_cell(world, fault, component, job.seconds)
                progress(f"{fault} {component}, {time.monotonic() - began:.0f} s: {summary_of(result)}")
                yield f"{fault} {component}", result
                if not is_clean(result):
                    await installations.discard()
    finally:
        await installations.discard()


def skipped(job: ChaosJob, fault: str) -> str | None:
    """Why a fault cannot be injected here."""
    if fault == DISK and not job.may_mount:
        return "this user may not mount a tmpfs in a namespace of its own"
    return missing_for_clocks() if fault == CLOCK else None


def is_clean(result: CellResult) -> bool:
    """Whether the installation is as before."""
    return result.recovery_s is not None and not result.drift_pico and result.quotas_exact


def shape_of(job: ChaosJob) -> dict[str, Any]:
    return {"seconds": job.seconds, "scripted": job.scripted, "client_timeout_s": TIMEOUT_S}


def figure_of(result: CellResult) -> dict[str, Any]:
    return {
        "requests": result.requests,
        "refused": result.refused,
        "errors": result.errors.total(),
        "errors_by_code": dict(result.errors),
        "unexpected_ends": result.unexpected_ends,
        "given_up": result.given_up,
        "fault_s": result.fault_s,
        "recovery_s": result.recovery_s,
        "drift_pico": result.drift_pico,
        "rows": sum(each.rows for each in result.drifts),
        "missing": sum(each.missing for each in result.drifts),
        "duplicated": sum(each.duplicated for each in result.drifts),
        "unexpected_rows": sum(each.unexpected for each in result.drifts),
        "unbilled_tokens": sum(each.unbilled_tokens for each in result.drifts),
        "quotas_exact": result.quotas_exact,
        "restarts": result.restarts,
        "ready_refused_s": result.readiness.ready_refused,
        "unready_served_s": result.readiness.unready_served,
        "unready_s": result.readiness.unready,
    }


def summary_of(result: CellResult) -> str:
    """One line for people who wait for the next cell."""
    recovered = "no recovery" if result.recovery_s is None else f"recovered after {result.recovery_s:.1f} s"
    exact = "exact" if result.quotas_exact else "not exact"
    return (
        f"{result.errors.total()} errors of {result.requests} requests, {result.unexpected_ends} cut off, "
        f"{result.given_up} given up, {recovered}, drift {result.drift_pico}, quotas {exact}; /readyz said ready in "
        f"{result.readiness.ready_refused} s with refusals, unready in {result.readiness.unready_served} s with responses"
    )


def notes_of(result: CellResult) -> list[str]:
    """What the table has no room for."""
    notes = [f"{count} x {code}" for code, count in sorted(result.errors.items())]
    notes += result.quota_differences
    if result.over_quota_tokens:
        notes.append(f"{result.over_quota_tokens} tokens above a quota")
    return notes


def ratios_of(results: Sequence[tuple[str, CellResult]]) -> list[Ratio]:
    """What must hold over all cells."""
    cut = " ".join(CUT_BY_DEATH)
    ends = sum(result.unexpected_ends for name, result in results if name != cut)
    given_up = sum(result.given_up for _, result in results)
    rows = sum(each.missing + each.duplicated for _, result in results for each in result.drifts)
    inexact = sum(not result.quotas_exact for _, result in results)
    lost = sum(result.recovery_s is None for _, result in results)
    drift = sum(result.drift_pico for _, result in results)
    return [
        Ratio("ledger drift in pico-units", float(drift), 0.0, "at most"),
        Ratio("missing and duplicated rows", float(rows), 0.0, "at most"),
        Ratio(f"unexpected ends but of {cut}", float(ends), 0.0, "at most"),
        Ratio(f"requests that clients gave up after {TIMEOUT_S:g} s", float(given_up), 0.0, "at most"),
        Ratio("cells with quotas that are not exact", float(inexact), 0.0, "at most"),
        Ratio("cells without a recovery", float(lost), 0.0, "at most"),
    ]
