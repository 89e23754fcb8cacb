"""What stands beside the ledger in the console's benchmark: adapters, keys, prices, limits, a log, and people who are signed in.

Invariant: every tenant has one of everything that a page has an id of, and the largest tenant is opened in every second view.
"""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import httpx
from fastapi import FastAPI
from sqlalchemy import text
from tests.benchmarks.ledger_rows import LedgerShape, months_until
from tests.tenants.registry_records import AliasWriter, RegistryWriter
from tests.tenants.webhooks.webhooks import add_event, add_webhook, dispatched

from loraplex.platform.bench.report import BenchFailed
from loraplex.platform.observability.request_id import RequestIds
from loraplex.platform.observability.request_record import ObservedRequests
from loraplex.platform.web.console.cookies import SESSION_COOKIE
from loraplex.tenants.actors import system_actor
from loraplex.tenants.database import Database
from loraplex.tenants.invoices import use_cases as invoices
from loraplex.tenants.invoices.invoices import invoice_id
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.people import memberships, users
from loraplex.tenants.people.sessions import (
    Area,
    Client,
    open_session,
)
from loraplex.tenants.unit_of_work import unit_of_work

AUDITED: Final = 2000
"""Entries of each tenant in the audit log."""
REPORTED: Final = timedelta(days=89)
"""How long ago the reports of usage begin."""
REGISTRY: Final = (
    """
INSERT INTO adapters (id, tenant_id, name)
SELECT adapter_id, tenant_id, 'adapter-' || row_number() OVER (PARTITION BY tenant_id ORDER BY adapter_id)
FROM (
    SELECT DISTINCT tenant_id, subject_id AS adapter_id FROM usage_totals WHERE level = 'adapter'
) u
""",
    """
INSERT INTO api_keys (id, tenant_id, key_id, environment, secret_sha256, name, scopes)
SELECT api_key_id, tenant_id, left(replace(gen_random_uuid()::text, '-', ''), 16), 'live', sha256('key'), 'key', '{inference}'
FROM (SELECT DISTINCT tenant_id, subject_id AS api_key_id FROM usage_totals WHERE level = 'key') u
""",
    """
INSERT INTO quotas (id, tenant_id, requests_per_minute, tokens_per_minute, tokens_per_day, budget_per_month)
SELECT gen_random_uuid(), id, 600, 60000, 100000000, 30000000 FROM tenants
""",
    """
INSERT INTO audit_entries (id, tenant_id, at, actor_kind, actor, action, target, before, after)
SELECT (lpad(to_hex(floor(extract(epoch FROM at) * 1000)::bigint), 12, '0') || '7' || substr(hash, 1, 3) || '8'
        || substr(hash, 4, 15))::uuid,
    id, at, 'user', 'admin@example.com', 'alias.move', 'adapters/adapter-1/aliases/production',
    jsonb_build_object('version', n), jsonb_build_object('version', n + 1)
FROM (
    SELECT t.id, n, now() - n * interval '1 hour' AS at, md5(t.id::text || n) AS hash
    FROM tenants t CROSS JOIN generate_series(1, :audited) n
) e
""",
)
ADAPTERS: Final = text("SELECT tenant_id, name FROM adapters ORDER BY tenant_id, name")
NAMES: Final = text("""
SELECT (SELECT min(name) FROM adapters WHERE tenant_id = :tenant_id) AS name,
    (SELECT min(key_id) FROM api_keys WHERE tenant_id = :tenant_id) AS key_id,
    (SELECT id FROM usage_records WHERE tenant_id = :tenant_id ORDER BY id DESC LIMIT 1) AS request_id
""")
KNOWN: Final = frozenset(
    {
        *("name", "key_id", "request_id", "version", "alias", "entry_id"),
        *("webhook_id", "delivery_id", "invoice_id", "tenant_id"),
    }
)
"""Parameters of paths that every loaded tenant has a value for."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """The connection of a person. `names`: what stands for the parameters of paths. `cookie`: name and token of the session."""

    http: httpx.AsyncClient
    names: dict[str, str]
    cookie: tuple[str, str]

    async def shows(self, path: str) -> bool:
        """Return whether there is a page at `path`: no download, no part of a page, no way to another one."""
        response = await self.http.get(self.address(path))
        if response.status_code >= 500:
            raise BenchFailed(f"{path} was answered with {response.status_code}")
        return response.status_code == 200 and "<html" in response.text[:200]

    async def load(self, path: str) -> tuple[str, int]:
        """The text of a response and its bytes as they were sent. Raises `BenchFailed` for any status but 200."""
        async with self.http.stream("GET", self.address(path)) as response:
            content = (await response.aread()).decode()
        if response.status_code != 200:
            raise BenchFailed(f"{path} was answered with {response.status_code}: {content[:200]}")
        return content, response.num_bytes_downloaded

    def address(self, path: str) -> str:
        """`path` with the names in place of its parameters; a page about a key's limits names the key."""
        names = self.names
        if "/keys/{name}" in path:
            names = names | {"name": names["key_id"]}
        return path.format(**names)


async def load_registry(database: Database) -> None:
    """Add what the ledger names, with versions in production, limits for each tenant, and a log."""
    async with database.as_operator() as session:
        for statement in REGISTRY:
            await session.execute(text(statement), {"audited": AUDITED} if ":audited" in statement else {})
        for tenant_id, name in (await session.execute(ADAPTERS)).all():
            version = await RegistryWriter(session, tenant_id).add_version(
                name, digest=tenant_id.hex * 2, size_bytes=1 << 20, rank=8, config={}, report={}
            )
            await AliasWriter(session, tenant_id).set(name, "production", {version.version: 100})
    async with database.as_operator() as session:
        await session.execute(text("ANALYZE audit_entries, adapters, adapter_versions, api_keys"))


async def sign_in_admin(
    app: FastAPI, database: Database, tenant_id: UUID, shape: LedgerShape, stack: AsyncExitStack
) -> Visitor:
    """Sign an admin of the tenant in, whose tenant has an invoice of its first month, an endpoint and a delivery."""
    async with database.as_operator() as session:
        user_id = await users.create(session, f"{tenant_id}@example.com", "Admin", None)
        await memberships.add(session, tenant_id, user_id, "admin")
        named = await session.execute(NAMES, {"tenant_id": tenant_id})
        names = {name: str(value) for name, value in named.mappings().one().items()}
    endpoint_id = await add_webhook(database, tenant_id)
    await add_event(database, tenant_id)
    names |= {"version": "1", "alias": "production", "entry_id": str(user_id), "tenant_id": str(tenant_id)}
    names |= {"webhook_id": str(endpoint_id), "delivery_id": str(await dispatched(database, endpoint_id))}
    names["first_day"] = (datetime.now(UTC) - REPORTED).date().isoformat()
    names["invoice_id"] = await _draft_invoice(database, tenant_id, shape)
    return await _signed_in(app, database, user_id, tenant_id, names, stack)


async def sign_in_operator(
    app: FastAPI, database: Database, names: dict[str, str], stack: AsyncExitStack
) -> Visitor:
    """Sign an operator in who looks at the things of `names`."""
    async with database.as_operator() as session:
        user_id = await users.create(session, "operator@example.com", "Operator", None)
        await users.change(session, user_id, is_operator=True)
    return await _signed_in(app, database, user_id, None, names, stack)


async def _draft_invoice(database: Database, tenant_id: UUID, shape: LedgerShape) -> str:
    first = months_until(datetime.now(UTC), shape.months)[0]
    month = Month(first.year, first.month)
    async with unit_of_work(database, system_actor("bench"), None, None) as uow:
        await invoices.draft(uow, tenant_id, month, "USD", datetime.now(UTC))
    return str(invoice_id(tenant_id, month, "USD", 0))


async def _signed_in(
    app: Any,
    database: Database,
    user_id: UUID,
    tenant_id: UUID | None,
    names: dict[str, str],
    stack: AsyncExitStack,
) -> Visitor:
    area: Area = "operator" if tenant_id is None else "tenant"
    async with database.as_writer() as session:
        person = await users.credentials(session, user_id)
    async with unit_of_work(database, system_actor("bench"), None, None) as uow:
        opened = await open_session(uow, person, Client(None, None), area=area, now=datetime.now(UTC))
    cookie = SESSION_COOKIE[area], opened.token
    client = httpx.AsyncClient(
        transport=httpx.ASGITransport(RequestIds(ObservedRequests(app))),
        base_url="http://console.test",
        cookies=dict([cookie]),
        headers={"accept-encoding": "gzip"},
        timeout=60,
    )
    return Visitor(await stack.enter_async_context(client), names, cookie)
