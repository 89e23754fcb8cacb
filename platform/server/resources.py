"""Opens and checks what every part of a gateway stands on: database, Valkey, secret, admission, adapter storage, metrics, health.

Invariant: nothing is served before both stores answer, the database roles are safe and the database knows the secret.
"""

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Final

import structlog
from redis.asyncio import Redis

from loraplex.engine.messages import EngineInfo
from loraplex.platform.config import Settings
from loraplex.platform.datastores.blob_storage import BlobStorage
from loraplex.platform.datastores.connections import StoreAddresses
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.observability.health import Dependency, Health
from loraplex.platform.observability.metrics import Metrics
from loraplex.platform.server.components import open_admission_control
from loraplex.platform.server.prices import open_prices
from loraplex.platform.server.recognized_secret import recognized_secret
from loraplex.platform.server.start import GatewayStart, bounded_stage
from loraplex.platform.startup_errors import DependencyFailed
from loraplex.tenants import valkey
from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.billing.price_book import PriceBook
from loraplex.tenants.database import Database
from loraplex.tenants.errors import TenantsError
from loraplex.tenants.registry.adapters import tenants_with

LOG = structlog.get_logger("loraplex.gateway")

MAX_SHADOWED_NAMED: Final = 20
"""Most tenants that one warning names."""


@dataclass(frozen=True, slots=True)
class CheckedStores:
    """Both stores, which answer, and the server secret, which the database knows."""

    database: Database
    valkey_client: Redis
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayResources:
    """The engines, the stores and the storage of a gateway, open and checked, and what measures them."""

    served_model_name: str
    info: EngineInfo
    engines: EnginePool
    stores: CheckedStores
    metrics: Metrics
    health: Health
    prices: PriceBook
    admissions: QuotaAdmissionController
    blobs: BlobStorage

    @property
    def database(self) -> Database:
        return self.stores.database


async def open_checked_stores(
    start: GatewayStart, addresses: StoreAddresses, stack: AsyncExitStack
) -> CheckedStores:
    """Open the stores at `addresses` and check them; `stack` closes them. Raises `StartError`."""
    settings = start.settings
    database = Database(addresses.database_url, limits=settings.default_limits)
    stack.push_async_callback(database.close)
    client = valkey.open_valkey(addresses.redis_url)
    stack.push_async_callback(client.aclose)
    async with bounded_stage("asking PostgreSQL and Valkey"):
        await _require_answer("postgresql", database.ping())
        await _require_answer("valkey", valkey.ping(client))
        await _require_answer("postgresql", database.check_roles())
        secret = await recognized_secret(
            settings, database, start.on_stage, accept_new=start.accept_new_secret
        )
    return CheckedStores(database, client, secret)


async def open_resources(
    settings: Settings,
    served_model_name: str,
    stores: CheckedStores,
    addresses: StoreAddresses,
    engines: EnginePool,
    stack: AsyncExitStack,
) -> GatewayResources:
    """Open what stands on the stores; `stack` closes it. Raises `StartError`."""
    info, database = engines.info(), stores.database
    metrics = Metrics(
        served_model_name,
        version("loraplex"),
        info.max_model_len,
        engines,
        adapter_names=settings.metrics_adapter_names,
    )
    health = Health(
        engines=engines,
        dependencies={
            "postgresql": Dependency(database.ping, settings.readiness_grace_s),
            "valkey": Dependency(partial(valkey.ping, stores.valkey_client)),
        },
        metrics=metrics,
    )
    await health.check()
    async with bounded_stage("reading names and prices from PostgreSQL"):
        await warn_of_shadowed_adapters(database, served_model_name)
        prices = await open_prices(settings, database, stack)
    metrics.watch_prices(lambda: prices.age_s)
    admissions = await open_admission_control(
        settings, addresses.redis_url, database, prices, metrics.admission, stack
    )
    health.journal_trouble = admissions.journal_trouble
    return GatewayResources(
        served_model_name=served_model_name,
        info=info,
        engines=engines,
        stores=stores,
        metrics=metrics,
        health=health,
        prices=prices,
        admissions=admissions,
        blobs=await asyncio.to_thread(BlobStorage, settings, info.model_digest),
    )


async def _require_answer(name: str, ping: Awaitable[None]) -> None:
    try:
        await ping
    except (TenantsError, OSError) as error:
        raise DependencyFailed(f"{name}: {error}") from error


async def warn_of_shadowed_adapters(database: Database, served_name: str) -> None:
    """Log adapters that get no requests, because the base model was given their name later."""
    async with database.as_operator() as session:
        tenants = await tenants_with(session, served_name, MAX_SHADOWED_NAMED)
    if tenants:
        LOG.warning("adapters are shadowed by the base model of that name", name=served_name, tenants=tenants)
