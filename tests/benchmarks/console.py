"""The console with a ledger of millions of rows: each page's server time, and the bytes of its first load.

Invariant: pages are asked one after another, by an admin of another tenant each time, without a network. Beside them stands a
bare round trip to the same PostgreSQL in the same run.
"""

import random
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

import httpx
from fastapi import FastAPI
from fastapi.routing import APIRoute
from sqlalchemy import text
from tests.benchmarks.admission import opened_stores
from tests.benchmarks.gateway import dependencies_of
from tests.benchmarks.ledger import round_trips, spread
from tests.benchmarks.ledger_rows import LedgerShape, load_ledger

from loraplex.platform.bench.report import BenchFailed, Case, Ratio, Report
from loraplex.platform.console.app import ConsoleOptions, create_console
from loraplex.platform.console.cookies import SESSION_COOKIE
from loraplex.platform.console.routes import page_routers
from loraplex.platform.observability.request_id import RequestIds
from loraplex.tenants.database import Database
from loraplex.tenants.people.memberships import MembershipRepository
from loraplex.tenants.people.sessions import ABSOLUTE, NewSession, SessionRepository
from loraplex.tenants.people.users import UserRepository

MAX_MS, MAX_BYTES = 200.0, 150_000
COLUMNS: Final = (
    "p50_ms",
    "p95_ms",
    "max_ms",
    "html_bytes",
    "first_load_bytes",
    "round_trip_p50_ms",
    "round_trip_p95_ms",
)
WARM_UP: Final = 3
FILTERED: Final = {
    "/console": ("/console?range=7d", "/console?range=30d"),
    "/console/usage": (
        "/console/usage?split=key",
        "/console/usage?split=class",
        "/console/usage?bucket=1h",
    ),
    "/console/requests": ("/console/requests?adapter={name}", "/console/requests?outcome=failed&slower=5000"),
}
"""Further views of a page, by its path."""
REGISTRY: Final = (
    """
INSERT INTO adapters (id, tenant_id, name)
SELECT adapter_id, tenant_id, 'adapter-' || row_number() OVER (PARTITION BY tenant_id ORDER BY adapter_id)
FROM (SELECT DISTINCT tenant_id, adapter_id FROM usage_rollups WHERE adapter_id <> '00000000-0000-0000-0000-000000000000') u
""",
    """
INSERT INTO api_keys (id, tenant_id, key_id, environment, secret_sha256, name, scopes)
SELECT api_key_id, tenant_id, left(replace(gen_random_uuid()::text, '-', ''), 16), 'live', sha256('key'), 'key', '{inference}'
FROM (SELECT DISTINCT tenant_id, api_key_id FROM usage_rollups) u
""",
    """
WITH card AS (INSERT INTO rate_cards (scope, currency) VALUES ('all', 'USD') RETURNING id)
INSERT INTO price_versions (id, rate_card_id, version, prompt, cached_prompt, completion, effective)
SELECT md5('version' || n)::uuid, id, n + 1, 100000, 50000, 400000,
    tstzrange(now() - make_interval(years => 4 - 2 * n), CASE n WHEN 0 THEN now() - interval '2 years' END)
FROM card, generate_series(0, 1) n
""",
    """
INSERT INTO quotas (id, tenant_id, requests_per_minute, tokens_per_minute, tokens_per_day, budget_per_month)
SELECT gen_random_uuid(), id, 600, 60000, 100000000, 30000000 FROM tenants
""",
)
NAMES: Final = text("""
SELECT (SELECT min(name) FROM adapters WHERE tenant_id = :tenant_id) AS name,
    (SELECT min(key_id) FROM api_keys WHERE tenant_id = :tenant_id) AS key_id,
    (SELECT id FROM usage_records WHERE tenant_id = :tenant_id ORDER BY id DESC LIMIT 1) AS request_id
""")
KNOWN: Final = {"name", "key_id", "request_id"}
"""Parameters of paths that every loaded tenant has a value for."""
_PARAMETER: Final = re.compile(r"\{(\w+)\}")
_STATIC: Final = re.compile(r'(?:href|src)="(/console/static/[^"]+)"')


async def measure_console(shape: LedgerShape, views: int, progress: Callable[[str], None]) -> Report:
    """Load new stores, then measure. Takes minutes for millions of rows."""
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
    """Measure every page of a tenant on a loaded database."""
    await load_registry(database)
    report = Report("console", COLUMNS)
    trips = await round_trips(database, views)
    app = create_console(dependencies_of(database, admissions), ConsoleOptions())
    async with AsyncExitStack() as stack:
        browsers = [await opened(app, database, tenant, stack) for tenant in tenants]
        for path in pages_of(app):
            if not await browsers[0].shows(path):
                continue
            progress(path)
            figure = await measure_page(browsers, path, views)
            report.cases.append(Case(path, asdict(shape) | {"views": views}, figure | trips))
    worst = {name: max(case.figure[name] for case in report.cases) for name in ("p95_ms", "first_load_bytes")}
    report.ratios += [
        Ratio("ms of the slowest page at p95", worst["p95_ms"], MAX_MS, "at most"),
        Ratio("bytes of the largest first load, compressed", worst["first_load_bytes"], MAX_BYTES, "at most"),
    ]
    report.notes.append(
        "Each page is opened by an admin of each tenant in turn, with filters as a person would choose them; times are those of the "
        "application, without a network. A first load is the page and all that it names, as gzip."
    )
    return report


async def load_registry(database: Database) -> None:
    """Add the adapters, keys and prices that the ledger names, and limits for each tenant."""
    async with database.as_operator() as session:
        for statement in REGISTRY:
            await session.execute(text(statement))


class Browser:
    """The connection of a tenant's admin. `names`: what stands for the parameters of paths."""

    def __init__(self, http: httpx.AsyncClient, names: dict[str, str]) -> None:
        self.http = http
        self.names = names

    async def shows(self, path: str) -> bool:
        """Return whether there is a page at `path`: no download, no way to another page, nothing that this tenant has not."""
        response = await self.http.get(path.format(**self.names))
        if response.status_code >= 500:
            raise BenchFailed(f"{path} was answered with {response.status_code}")
        return response.status_code == 200 and response.headers["content-type"].startswith("text/html")

    async def load(self, path: str) -> tuple[str, int]:
        """The text of a response and its bytes as they were sent. Raises `BenchFailed` for any status but 200."""
        async with self.http.stream("GET", path.format(**self.names)) as response:
            content = (await response.aread()).decode()
        if response.status_code != 200:
            raise BenchFailed(f"{path} was answered with {response.status_code}: {content[:200]}")
        return content, response.num_bytes_downloaded


async def measure_page(browsers: Sequence[Browser], path: str, views: int) -> dict[str, float]:
    """Open a page by another tenant each time; then weigh its first load."""
    chosen, waits = random.Random(0), list[float]()
    for number in range(WARM_UP + views):
        browser = chosen.choice(browsers)
        began = time.perf_counter()
        await browser.load(path)
        if number >= WARM_UP:
            waits.append(time.perf_counter() - began)
    content, html_bytes = await browsers[0].load(path)
    static = [(await browsers[0].load(name))[1] for name in sorted(set(_STATIC.findall(content)))]
    return spread(waits) | {"html_bytes": html_bytes, "first_load_bytes": html_bytes + sum(static)}


async def opened(app: Any, database: Database, tenant_id: UUID, stack: AsyncExitStack) -> Browser:
    """Sign an admin of the tenant in."""
    async with database.as_operator() as session:
        user_id = await UserRepository(session).create(f"{tenant_id}@example.com", "Admin", None)
        await MembershipRepository(session, tenant_id).add(user_id, "admin")
        named = await session.execute(NAMES, {"tenant_id": tenant_id})
        names = {name: str(value) for name, value in named.mappings().one().items()}
    async with database.as_writer() as session:
        expires_at = datetime.now(UTC) + ABSOLUTE
        new = NewSession(user_id=user_id, tenant_id=tenant_id, expires_at=expires_at)
        token = await SessionRepository(session).create(new)
    client = httpx.AsyncClient(
        transport=httpx.ASGITransport(RequestIds(app)),
        base_url="http://console.test",
        cookies={SESSION_COOKIE["tenant"]: token},
        headers={"accept-encoding": "gzip"},
    )
    return Browser(await stack.enter_async_context(client), names)


def pages_of(app: FastAPI) -> list[str]:
    """The paths of a tenant's pages, and further views of some. Left out are paths with parameters that are not `KNOWN`."""
    paths = {
        route.path
        for router in page_routers(app.state.endpoint)
        for route in router.routes
        if isinstance(route, APIRoute)
        and "GET" in (route.methods or ())
        and route.path.startswith("/console")
    }
    known = [path for path in sorted(paths) if set(_PARAMETER.findall(path)) <= KNOWN]
    return [view for path in known for view in (path, *FILTERED.get(path, ()))]
