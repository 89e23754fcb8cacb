"""A tenant with limits and several gateways over one PostgreSQL and one Valkey, as tests of admissions need them."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg import sql
from psycopg.rows import dict_row
from redis.asyncio import Redis
from sqlalchemy import text
from tests.tenants.admission.memory_journal import MemoryJournal
from tests.tenants.billing.fixed_prices import fixed_prices
from tests.tenants.counters.limited_tenant import age
from tests.tenants.registry_records import make_tenant

from loraplex.platform.datastores.embedded.servers import EmbeddedServices
from loraplex.tenants.admission.config import AdmissionConfig
from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.admission.recording import AdmissionRecorder
from loraplex.tenants.api_keys.delegation import KeyDelegation
from loraplex.tenants.api_keys.keys import AuthenticatedKey, KeyRepository
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.counters.counter_replies import LimitUse
from loraplex.tenants.counters.snapshot import CounterSnapshot
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable
from loraplex.tenants.ids import uuid7
from loraplex.tenants.ledger.journal.journal import Journal
from loraplex.tenants.ledger.usage_ledger import Fence, UsageLedger
from loraplex.tenants.models import ApiKey, Quota
from loraplex.tenants.periods import periods_of
from loraplex.tenants.quotas.delegated_quotas import QuotaRepository
from loraplex.tenants.quotas.limits import QuotaLimits, Subject
from loraplex.tenants.quotas.reservation import Reservation, ReservationRequest, SettledUsage
from loraplex.tenants.scopes import INFERENCE, KEYS_WRITE
from loraplex.tenants.valkey import ANSWER_SECONDS, open_valkey

PRICE = Price(prompt=3_000, cached_prompt=1_000, completion=7_001)
# Long: machines are busy, and timeouts are tested where they matter.
SETTINGS = AdmissionConfig(valkey_s=10.0)


@dataclass(frozen=True)
class TenantWithGateways:
    """One tenant with limits; `gateway` starts gateways over one PostgreSQL and one Valkey."""

    database: Database
    valkey_url: str
    tenant_id: UUID
    key: AuthenticatedKey
    gateways: list[QuotaAdmissionController] = field(default_factory=list)

    @asynccontextmanager
    async def gateway(
        self,
        settings: AdmissionConfig = SETTINGS,
        clock: Callable[[], float] = time.monotonic,
        recorder: AdmissionRecorder | None = None,
        journal: Journal | None = None,
        killed: bool = False,
    ) -> AsyncIterator[QuotaAdmissionController]:
        """A gateway that confirms fences; its other background tasks do not run. With `killed`, it leaves without a trace."""
        journal = journal or MemoryJournal()
        redis = open_valkey(self.valkey_url, command_s=max(settings.valkey_s, ANSWER_SECONDS))
        admissions = QuotaAdmissionController(
            self.database,
            redis,
            fixed_prices(PRICE),
            journal.gateway_id,
            settings,
            journal=journal,
            clock=clock,
            recorder=recorder,
        )
        self.gateways.append(admissions)
        polling = asyncio.create_task(poll_fences(admissions))
        try:
            yield admissions
        finally:
            polling.cancel()
            await asyncio.wait({polling})
            self.gateways.remove(admissions)
            if killed:
                await admissions.maintenance.ledger.close()
            else:
                await admissions.close()
            await redis.aclose()

    async def shipped(self) -> None:
        """Every gateway has shipped its journal and sent what followed to the counters."""
        for gateway in self.gateways:
            await all_shipped(gateway)

    async def flush(self) -> None:
        """Valkey loses everything."""
        async with open_client(self.valkey_url) as client:
            await client.flushall()

    async def let_leases_run_out(self) -> None:
        """As if a minute had passed for all that is open, in both stores."""
        await self.rows("UPDATE reservations SET expires_at = now() - interval '1 second' RETURNING id")
        async with open_client(self.valkey_url) as client:
            await age(client, self.tenant_id, 60.0)

    def request(
        self, prompt: int = 10, completion: int = 20, key: AuthenticatedKey | None = None
    ) -> ReservationRequest:
        key = key or self.key
        return ReservationRequest(
            id=uuid7(),
            tenant_id=self.tenant_id,
            api_key_id=key.api_key_id,
            policy_epoch=key.policy_epoch or 0,
            request_id=f"req_{uuid4().hex}",
            prompt_tokens=prompt,
            completion_tokens=completion,
        )

    async def rows(self, statement: str, **parameters: object) -> list[dict[str, Any]]:
        async with await psycopg.AsyncConnection.connect(plain(self.database.url)) as connection:
            await connection.execute("SET ROLE app_writer")
            cursor = await connection.cursor(row_factory=dict_row).execute(statement, parameters)
            return await cursor.fetchall() if cursor.description else []

    async def fresh_key(self) -> AuthenticatedKey:
        return await found_key(self.database, self.key.key_id)


async def poll_fences(gateway: QuotaAdmissionController) -> None:
    while True:
        with suppress(DatabaseUnavailable):
            await gateway.maintenance.fences.poll()
        await asyncio.sleep(0.01)


async def all_shipped(gateway: QuotaAdmissionController) -> None:
    await gateway.maintenance.shipping.ship()
    await gateway.maintenance.settlements.sent()


@asynccontextmanager
async def open_client(url: str) -> AsyncIterator[Redis]:
    client = open_valkey(url, command_s=10.0)
    assert isinstance(client, Redis)
    yield client
    await client.aclose()


@asynccontextmanager
async def closed(services: EmbeddedServices, database: Database) -> AsyncIterator[None]:
    """Make the database unreachable: connections break, and new ones are refused."""
    name = database.url.partition("?")[0].rpartition("/")[2]
    async with await psycopg.AsyncConnection.connect(services.database_url, autocommit=True) as connection:
        allow = sql.SQL("ALTER DATABASE {} WITH ALLOW_CONNECTIONS {}")
        await connection.execute(allow.format(sql.Identifier(name), sql.Literal(False)))
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,)
        )
        try:
            yield
        finally:
            await connection.execute(allow.format(sql.Identifier(name), sql.Literal(True)))


@asynccontextmanager
async def closed_later(
    services: EmbeddedServices, database: Database
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """As `closed`, from a call of the result on until the end of the block."""
    async with AsyncExitStack() as stack:

        async def close() -> None:
            await stack.enter_async_context(closed(services, database))

        yield close


@asynccontextmanager
async def read_only(services: EmbeddedServices, database: Database) -> AsyncIterator[None]:
    """Make the database read-only, as on a standby."""
    name = sql.Identifier(database.url.partition("?")[0].rpartition("/")[2])
    end_all = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
    async with await psycopg.AsyncConnection.connect(services.database_url, autocommit=True) as connection:
        await connection.execute(
            sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(name)
        )
        await connection.execute(end_all, (name.as_string().strip('"'),))
        try:
            yield
        finally:
            await connection.execute(
                sql.SQL("ALTER DATABASE {} RESET default_transaction_read_only").format(name)
            )
            await connection.execute(end_all, (name.as_string().strip('"'),))


def plain(url: str) -> str:
    return url.replace("postgresql+psycopg://", "postgresql://")


async def found_key(database: Database, key_id: str) -> AuthenticatedKey:
    async with database.as_writer() as session:
        key = await KeyRepository(session).find(key_id)
    assert key is not None
    return key


async def make_tenant_with_gateways(
    database: Database, valkey_url: str, name: str = "acme", **limits: int
) -> TenantWithGateways:
    """`limits` are the tenant's own."""
    tenant_id = await make_tenant(database, name)
    async with database.as_operator() as session:
        issued = await KeyRepository(session).create(tenant_id, "first", ["inference"])
        session.add(Quota(tenant_id=tenant_id, **limits))
    return TenantWithGateways(
        database, valkey_url, tenant_id, await found_key(database, issued.record.key_id)
    )


async def set_limits(tenant: TenantWithGateways, **limits: int | None) -> AuthenticatedKey:
    """Changes the tenant's own limits. Returns the key as it is then."""
    sets = ", ".join(f"{name} = :{name}" for name in limits)
    async with tenant.database.as_operator() as session:
        await session.execute(
            text(f"UPDATE quotas SET {sets} WHERE tenant_id = :tenant AND api_key_id IS NULL"),
            {**limits, "tenant": tenant.tenant_id},
        )
    return await tenant.fresh_key()


async def family(tenant: TenantWithGateways, depth: int, **limits: int) -> list[AuthenticatedKey]:
    """Keys that mint one another; `limits` are those of the first, which each one passes on."""
    async with tenant.database.as_operator() as session:
        first = await KeyRepository(session).create(tenant.tenant_id, "root", [INFERENCE, KEYS_WRITE])
        if limits:
            session.add(Quota(tenant_id=tenant.tenant_id, api_key_id=first.record.id, **limits))
    records = [first.record]
    while len(records) < depth:
        records.append(await mint(tenant, records[-1]))
    return [await found_key(tenant.database, each.key_id) for each in records]


async def mint(tenant: TenantWithGateways, parent: ApiKey | AuthenticatedKey) -> ApiKey:
    parent_id = parent.id if isinstance(parent, ApiKey) else parent.api_key_id
    async with tenant.database.as_tenant(tenant.tenant_id) as session:
        keys = KeyDelegation(session, tenant.tenant_id, parent_id)
        return (await keys.create("minted", [INFERENCE, KEYS_WRITE])).record


async def limit_key(tenant: TenantWithGateways, key_id: str, **limits: int) -> None:
    """Sets all limits of a key, as a person does."""
    async with tenant.database.as_tenant(tenant.tenant_id) as session:
        await KeyRepository(session).locked(tenant.tenant_id, key_id)
        quotas = QuotaRepository(session, tenant.tenant_id)
        await quotas.narrow(await quotas.locked(await quotas.key(key_id)), QuotaLimits(**limits))


def usage(reservation: Reservation, completion: int = 5, cached: int = 0) -> SettledUsage:
    return SettledUsage(
        outcome="completed", prompt_tokens=10, cached_tokens=cached, completion_tokens=completion
    )


async def snapshot_of(ledger: UsageLedger, fence: Fence) -> tuple[int, CounterSnapshot]:
    """The epoch behind a fence and its snapshot; the fence must allow it."""
    taken = await ledger.take_snapshot(fence)
    assert taken is not None
    return taken


async def used(
    admissions: QuotaAdmissionController, tenant_id: UUID, subjects: Sequence[Subject] | None = None
) -> dict[str, LimitUse]:
    """The use of the tenant itself, by its limits' names; with `subjects`, without PostgreSQL."""
    uses = await admissions.quotas(tenant_id, subjects or await limited_subjects(admissions, tenant_id))
    return {use.name: use for use in uses if use.level == "tenant"}


async def limited_subjects(admissions: QuotaAdmissionController, tenant_id: UUID) -> list[Subject]:
    """The tenant and all that has limits of its own."""
    policy = await admissions.maintenance.ledger.policy(tenant_id)
    keys = [Subject("key", each, limits) for each, limits in policy.keys.items()]
    adapters = [Subject("adapter", each, limits) for each, limits in policy.adapters.items()]
    return [Subject("tenant", tenant_id, policy.tenant), *keys, *adapters]


TOTALS = """
    SELECT period, tokens::bigint, amount_nano::bigint, requests::bigint FROM usage_totals
    WHERE tenant_id = %(tenant)s AND level = 'tenant'
"""
SUMS = """
    SELECT day AS period, sum(uncached_tokens + cached_tokens + completion_tokens)::bigint AS tokens,
        sum((amount_pico + 999) / 1000)::bigint AS amount_nano, count(*) AS requests
    FROM usage_records WHERE tenant_id = %(tenant)s GROUP BY day
    UNION ALL
    SELECT month, sum(uncached_tokens + cached_tokens + completion_tokens)::bigint, sum((amount_pico + 999) / 1000)::bigint, count(*)
    FROM usage_records WHERE tenant_id = %(tenant)s GROUP BY month
"""


async def check_ledger(tenant: TenantWithGateways, admissions: QuotaAdmissionController) -> tuple[int, int]:
    """Records, totals and counters agree and nothing is open: the day's tokens, and how many requests were written."""
    await tenant.shipped()
    totals = {row["period"]: row for row in await tenant.rows(TOTALS, tenant=tenant.tenant_id)}
    sums = {row["period"]: row for row in await tenant.rows(SUMS, tenant=tenant.tenant_id)}
    assert totals == sums
    assert await tenant.rows("SELECT id FROM reservations") == []
    now = periods_of(datetime.now(UTC))
    uses = await used(admissions, tenant.tenant_id)
    for name, period in (("day", now.day), ("month", now.month)):
        total = totals.get(period, {"tokens": 0, "amount_nano": 0})
        assert (uses[f"tokens_per_{name}"].used, uses[f"tokens_per_{name}"].reserved) == (total["tokens"], 0)
        assert uses[f"budget_per_{name}"].used == -(-total["amount_nano"] // 1000)
        assert uses[f"budget_per_{name}"].reserved == 0
    assert uses["concurrent_requests"].used == 0
    today = totals.get(now.day, {"tokens": 0, "requests": 0})
    return today["tokens"], today["requests"]
