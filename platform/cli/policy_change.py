"""Transaction, audit entry and publishing of a command's change to keys, tenants or limits.

Invariant: a committed change stays, also when gateways cannot be notified. Those see it when their caches expire, within a
second.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

import typer
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.cli.command_context import open_command_stores
from loraplex.tenants.audit_log import Actor, AuditRepository
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.database import Database
from loraplex.tenants.errors import ValkeyUnavailable
from loraplex.tenants.models import Tenant
from loraplex.tenants.valkey import open_valkey


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """One transaction as operator. After the commit, gateways are notified of the policies of `tenants`."""

    session: AsyncSession
    command: str
    tenants: set[UUID] = field(default_factory=set)

    def audit(self, tenant_id: UUID | None) -> AuditRepository:
        """The audit log of a tenant that the change affects, or of the operators."""
        if tenant_id is not None:
            self.tenants.add(tenant_id)
        return AuditRepository(self.session, Actor("command", self.command), tenant_id)


@asynccontextmanager
async def policy_change(command: str, data_dir: Path | None) -> AsyncIterator[PolicyChange]:
    """Open a transaction of `command`, such as `key revoke`; then notify every gateway that shares its Valkey."""
    async with open_command_stores(data_dir) as stores, open_counters(stores.redis_url) as counters:
        async with stores.database.as_operator() as session:
            change = PolicyChange(session, command)
            yield change
        if counters is not None and change.tenants:
            await publish(stores.database, counters, change.tenants)


@asynccontextmanager
async def open_counters(redis_url: str | None) -> AsyncIterator[Counters | None]:
    """Open the counters; they connect on first use. Raises `InvalidField` for a malformed address."""
    if redis_url is None:
        yield None
        return
    client = open_valkey(redis_url)
    try:
        yield Counters(client)
    finally:
        await client.aclose()


async def publish(database: Database, counters: Counters, tenants: set[UUID]) -> None:
    async with database.as_operator() as session:
        query = select(Tenant.id, Tenant.policy_epoch).where(Tenant.id.in_(tenants))
        epochs = (await session.execute(query)).all()
    try:
        for tenant_id, epoch in epochs:
            await counters.publish_policy(tenant_id, epoch)
    except ValkeyUnavailable as error:
        typer.echo(f"{error}: running servers see the change within a second", err=True)
