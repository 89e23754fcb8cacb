"""The console with a ledger of millions of rows: each page's server time, statements, and the bytes of its first load.

Invariant: pages are asked one after another without a network, in every second view by the largest tenant. Beside them stands
a bare round trip to the same PostgreSQL in the same run. What was measured before an interruption is kept.
"""

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from statistics import median_low
from types import SimpleNamespace
from typing import Any, Final
from uuid import UUID

from fastapi import FastAPI
from fastapi.routing import APIRoute
from tests.benchmarks.admission import opened_stores
from tests.benchmarks.console_world import (
    KNOWN,
    Visitor,
    load_registry,
    sign_in_admin,
    sign_in_operator,
)
from tests.benchmarks.first_paint import CHROMIUM, measure_paint
from tests.benchmarks.gateway import Figures, dependencies_of
from tests.benchmarks.ledger import round_trips, spread
from tests.benchmarks.ledger_rows import LedgerShape, load_ledger
from tests.platform.sent_statements import sent_statements

from loraplex.adapters.limits import UploadConfig
from loraplex.platform.bench.report import Case, Ratio, Report
from loraplex.platform.web.console_app import ConsoleOptions, create_console
from loraplex.platform.web.page_routes import page_routers
from loraplex.tenants.database import Database

MAX_MS, MAX_BYTES = 200.0, 150_000
COLUMNS: Final = ("p50_ms", "p95_ms", "statements", "first_load_bytes")
"""Those of the table; a page's line and its figure have more."""
WARM_UP: Final = 3
PAGE_SECONDS: Final = 30.0
"""A page that is slower than the bound is opened so long, and at least twice."""
FILTERED: Final = {
    "/console": ("/console?range=7d", "/console?range=30d"),
    "/console/usage": (
        *(
            f"/console/usage?from={{first_day}}&bucket={bucket}&split={split}"
            for bucket in ("1h", "1d")
            for split in ("adapter", "key", "class")
        ),
    ),
    "/console/requests": (
        *("/console/requests?adapter={name}", "/console/requests?key={key_id}"),
        *("/console/requests?outcome=failed", "/console/requests?slower=5000"),
        "/console/requests?adapter={name}&outcome=failed&slower=5000",
    ),
    "/console/audit": ("/console/audit?action=key.create",),
    "/operator/console/audit": ("/operator/console/audit?action=key.create",),
}
"""Further views of a page, by its path."""
PAINTED: Final = ("/console", "/console/usage", "/console/requests", "/operator/console")
_PARAMETER: Final = re.compile(r"\{(\w+)\}")
_STATIC: Final = re.compile(r'(?:href|src)="(/console/static/[^"]+)"')


@dataclass(frozen=True, slots=True)
class World:
    """The console's application and who opens it: admins, that of the largest tenant first, and an operator."""

    app: FastAPI
    database: Database
    admins: Sequence[Visitor]
    operator: Visitor
    static: dict[str, int] = field(default_factory=dict)

    def visitors(self, path: str) -> Sequence[Visitor]:
        """Who opens a page."""
        return [self.operator] if path.startswith("/operator/") else self.admins

    async def bytes_of(self, named: Sequence[str]) -> int:
        """The bytes of static files as they are sent. Each is loaded once."""
        for name in named:
            if name not in self.static:
                self.static[name] = (await self.operator.load(name))[1]
        return sum(self.static[name] for name in named)


async def measure_console(shape: LedgerShape, views: int, progress: Callable[[str], None]) -> Report:
    """Load new stores, then measure."""
    async with opened_stores() as (database, admissions):
        tenants = await load_ledger(database.url, shape, progress)
        return await measure_on(database, admissions, tenants, shape, views, progress)


async def measure_on(
    database: Database,
    admissions: Any,
    tenants: Sequence[UUID],
    shape: LedgerShape,
    views: int,
    progress: Callable[[str], None],
) -> Report:
    """Measure every page of both areas on a loaded database."""
    report, trips = Report("console", COLUMNS), await round_trips(database, views)
    progress(
        f"bare round trip: p50 {trips['round_trip_p50_ms']:.1f} ms, p95 {trips['round_trip_p95_ms']:.1f} ms"
    )
    async with opened_world(database, admissions, tenants, shape) as world:
        await collect(report, measured(world, views), asdict(shape) | {"views": views}, trips, progress)
    if report.cases:
        report.ratios += ratios(report.cases)
    report.notes.append(
        "Each page is opened by an admin of the largest tenant and by those of others in turn, with filters as a person would choose "
        "them; times are those of the application, without a network. A first load is the page and all that it names, as gzip. "
        "Paint times are Chromium's, with an empty cache, on the same cores."
    )
    return report


async def collect(
    report: Report,
    figures: AsyncIterator[tuple[str, Figures]],
    shapes: Mapping[str, int],
    trips: Figures,
    progress: Callable[[str], None],
) -> None:
    """Add each page to the report as soon as it is measured. A cancelled benchmark ends here, with what it has."""
    try:
        async for path, figure in figures:
            report.cases.append(Case(path, shapes, figure | trips))
            progress(line(path, figure))
    # Minutes of measuring are not thrown away.
    except asyncio.CancelledError:
        report.notes.append("Stopped before its end: further pages were not measured.")


def ratios(cases: Sequence[Case]) -> list[Ratio]:
    """The worst page of each kind beside its bound."""
    slowest = max(cases, key=lambda case: case.figure["p95_ms"])
    largest = max(cases, key=lambda case: case.figure["first_load_bytes"])
    return [
        Ratio(f"ms of the slowest page at p95, {slowest.name}", slowest.figure["p95_ms"], MAX_MS, "at most"),
        Ratio(
            f"bytes of the largest first load, {largest.name}",
            largest.figure["first_load_bytes"],
            MAX_BYTES,
            "at most",
        ),
    ]


def line(path: str, figure: Figures) -> str:
    """One page's figures and its verdict."""
    holds = figure["p95_ms"] <= MAX_MS and figure["first_load_bytes"] <= MAX_BYTES
    text = (
        f"{'PASS' if holds else 'SHORT':5} {path}: p50 {figure['p50_ms']:.1f} ms, p95 {figure['p95_ms']:.1f} ms, "
        f"{figure['statements']:.0f} statements, {figure['first_load_bytes']:,.0f} bytes"
    )
    if "first_paint_ms" not in figure:
        return text
    return (
        f"{text}, first paint {figure['first_paint_ms']:.0f} ms, largest {figure['largest_paint_ms']:.0f} ms"
    )


@asynccontextmanager
async def opened_world(
    database: Database, admissions: Any, tenants: Sequence[UUID], shape: LedgerShape
) -> AsyncIterator[World]:
    """Fill the tables beside the ledger, and sign people in."""
    await load_registry(database)
    dependencies = replace(dependencies_of(database, admissions), uploads=_uploads())
    app = create_console(dependencies, ConsoleOptions())
    async with AsyncExitStack() as stack:
        admins = [await sign_in_admin(app, database, each, shape, stack) for each in tenants]
        operator = await sign_in_operator(app, database, admins[0].names, stack)
        yield World(app, database, admins, operator)


async def measured(world: World, views: int) -> AsyncIterator[tuple[str, Figures]]:
    """The figures of each page. The painted ones come first, while a browser is open beside nothing else."""
    painted = await measure_paint(world.app, _painted(world)) if CHROMIUM.exists() else {}
    for path in pages_of(world.app):
        if await world.visitors(path)[0].shows(path):
            yield path, await measure_page(world, path, views) | painted.get(path, {})


def _painted(world: World) -> dict[str, tuple[str, str]]:
    return {path: world.visitors(path)[0].cookie for path in PAINTED}


async def measure_page(world: World, path: str, views: int) -> Figures:
    """Open a page by the largest tenant and another one in turn; then weigh its first load."""
    visitors, chosen = world.visitors(path), random.Random(0)
    waits, sent, weights = list[float](), list[int](), list[int]()
    ends = time.perf_counter() + PAGE_SECONDS
    with sent_statements(world.database) as statements:
        for number in range(WARM_UP + views):
            visitor = visitors[0] if number % 2 else chosen.choice(visitors)
            statements.clear()
            began = time.perf_counter()
            content, html_bytes = await visitor.load(path)
            if number >= WARM_UP:
                waits.append(time.perf_counter() - began)
                sent.append(len(statements))
                weights.append(html_bytes)
            if len(waits) >= 2 and time.perf_counter() > ends:
                break
    named = sorted(set(_STATIC.findall(content)))
    sizes = {"html_bytes": max(weights), "first_load_bytes": max(weights) + await world.bytes_of(named)}
    return spread(waits) | {"views": len(waits), "statements": median_low(sent)} | sizes


def pages_of(app: FastAPI) -> list[str]:
    """The paths of all pages, and further views of some. Left out are paths with parameters that are not `KNOWN`."""
    paths = {
        route.path
        for router in page_routers(app.state.endpoint.dependencies)
        for route in router.routes
        if isinstance(route, APIRoute) and "GET" in (route.methods or ())
    }
    known = [path for path in sorted(paths) if set(_PARAMETER.findall(path)) <= KNOWN]
    return [view for path in known for view in (path, *FILTERED.get(path, ()))]


def _uploads() -> Any:
    """Storage that answers at once."""

    async def nothing() -> None:
        return None

    return SimpleNamespace(limits=UploadConfig(), disk_space=nothing, require_store=nothing)
