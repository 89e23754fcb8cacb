"""A gateway whose admissions are counted in real stores, and a tenant with limits."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import httpx
from tests.tenants.admission.memory_journal import MemoryJournal
from tests.tenants.billing.fixed_prices import fixed_prices

from loraplex.engine.fake_engine import FakeScript
from loraplex.platform.inference.dependencies import ServingConfig
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.database import Database
from loraplex.tenants.models import Quota
from loraplex.tenants.valkey import open_valkey

CACHED = FakeScript(cached_tokens=2)
PRICE = Price(prompt=1_000_000, cached_prompt=500_000, completion=2_000_000)


@asynccontextmanager
async def counting(database: Database, valkey_url: str) -> AsyncIterator[QuotaAdmissionController]:
    """The admissions of a gateway, counted in real stores."""
    client = open_valkey(valkey_url)
    admissions = QuotaAdmissionController(
        database, client, fixed_prices(PRICE), uuid4(), journal=MemoryJournal()
    )
    yield admissions
    await admissions.close()
    await client.aclose()


@asynccontextmanager
async def limited(
    start_gateway: Any,
    database: Database,
    valkey_url: str,
    script: FakeScript = CACHED,
    serving: ServingConfig | None = None,
    /,
    **limits: int,
) -> AsyncIterator[tuple[Any, httpx.AsyncClient]]:
    """A gateway that counts, and a client with the admin key of its tenant `boss`, which has `limits`."""
    async with counting(database, valkey_url) as admissions:
        gateway = await start_gateway(script, serving, database, admissions=admissions)
        gateway.key = await gateway.tenant("boss", ("tenant:admin",))
        async with database.as_operator() as session:
            tenant = await TenantRepository(session).get("boss")
            session.add(Quota(tenant_id=tenant.id, **limits))
        headers = {"authorization": f"Bearer {gateway.key}"}
        async with httpx.AsyncClient(base_url=f"{gateway.url}/tenant/v1", headers=headers) as http:
            yield gateway, http
