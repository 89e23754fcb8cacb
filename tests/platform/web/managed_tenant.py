"""A client of the tenant plane, and helpers that write its database rows directly."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import httpx
from sqlalchemy import text
from tests.tenants.registry_records import RegistryWriter, digest

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.database import Database
from loraplex.tenants.ids import uuid7

RESERVE = (
    "INSERT INTO reservations (id, tenant_id, api_key_id, adapter_id, digest, gateway_id, prompt_tokens, "
    "completion_tokens, amount_nano, day, month, expires_at) VALUES (:id, :tenant_id, :id, :adapter_id, :digest, :id, "
    "1, 1, 1, 'd:2026-11-21', 'm:2026-11', now() + interval '1 hour')"
)


@dataclass
class ManagedTenant:
    """`http` speaks to the tenant plane with its key."""

    http: httpx.AsyncClient
    gateway: Any
    database: Database
    id: UUID
    key: str

    async def version(self, number: int, name: str = "pirate", state: str = "ready") -> int:
        """A further version, of a digest of its own."""
        async with self.database.as_tenant(self.id) as session:
            adapters = RegistryWriter(session, self.id)
            await adapters.get_or_create(name)
            report = {
                "checks": [
                    {"name": "finite", "passed": True, "detail": "every value is finite", "warning": False}
                ],
                "system_fingerprint": "fp_0123456789abcdef",
            }
            made = await adapters.add_version(
                name,
                digest=digest(number),
                size_bytes=10,
                rank=8,
                config={"r": 8},
                report=report,
                state=state,
            )
            return made.version

    async def put(self, alias: str, body: object, etag: int | None, name: str = "pirate") -> httpx.Response:
        """Moves the alias from `etag`; None: it is new."""
        headers = {"if-none-match": "*"} if etag is None else {"if-match": f'"{etag}"'}
        return await self.http.put(f"adapters/{name}/aliases/{alias}", json=body, headers=headers)

    async def reserve(self, number: int, name: str = "pirate") -> None:
        """A request that runs on the version with this digest."""
        async with self.database.as_operator() as session:
            adapter = await RegistryWriter(session, self.id).get(name)
        values = {"id": uuid7(), "tenant_id": self.id, "adapter_id": adapter.id, "digest": digest(number)}
        async with self.database.as_writer() as session:
            await session.execute(text(RESERVE), values)

    async def settle(self) -> None:
        """Every running request ends."""
        async with self.database.as_writer() as session:
            await session.execute(text("DELETE FROM reservations"))

    async def actions(self) -> list[tuple[str, str]]:
        """(action, target) of the audit log, oldest first."""
        listing = (await self.http.get("audit?limit=100")).json()["data"]
        return [(entry["action"], entry["target"]) for entry in reversed(listing)]

    async def limit(self, **limits: int) -> None:
        """Limits of the tenant, as an operator sets them."""
        names = ", ".join(limits)
        values = ", ".join(f":{name}" for name in limits)
        async with self.database.as_operator() as session:
            statement = f"INSERT INTO quotas (id, tenant_id, {names}) VALUES (:id, :tenant_id, {values})"
            await session.execute(text(statement), {"id": uuid7(), "tenant_id": self.id, **limits})


@asynccontextmanager
async def managed(gateway: Any, name: str) -> AsyncIterator[ManagedTenant]:
    key = await gateway.tenant(name, ("tenant:admin",))
    async with gateway.database.as_operator() as session:
        tenant_id = (await TenantRepository(session).get(name)).id
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=f"{gateway.url}/tenant/v1/", headers=headers) as client:
        yield ManagedTenant(client, gateway, gateway.database, tenant_id, key)
