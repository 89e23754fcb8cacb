"""The tenant whose requests a drill sends: made for one drill, bounded in its load, and ended with it.

Invariant: its name is taken as long as it lives, so an installation has at most one drill at a time.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

from loraplex.tenants.actors import command_actor
from loraplex.tenants.administration import tenants
from loraplex.tenants.api_keys import use_cases as api_keys
from loraplex.tenants.api_keys.records import KeyChange
from loraplex.tenants.api_keys.use_cases import Operator
from loraplex.tenants.database import Database
from loraplex.tenants.scopes import INFERENCE
from loraplex.tenants.unit_of_work import unit_of_work

TENANT_NAME: Final = "loraplex-drill"


@dataclass(frozen=True, slots=True)
class DrillTenant:
    """The tenant of a running drill. Its key has the scopes of its terms."""

    tenant_id: UUID
    api_key: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillTenantTerms:
    """What a drill's tenant gets: its share of the engine, and limits on its sequences in progress and its tokens per day."""

    name: str = TENANT_NAME
    weight: float = 1.0
    concurrent_requests: int
    tokens: int
    scopes: tuple[str, ...] = (INFERENCE,)


async def create_drill_tenant(database: Database, terms: DrillTenantTerms, life_s: float) -> DrillTenant:
    """Create a tenant, whose key ends after `life_s` seconds.

    Raises `NameTaken` while another drill has one, and `DatabaseUnavailable`.
    """
    limits = {"concurrent_requests": terms.concurrent_requests, "tokens_per_day": terms.tokens}
    async with unit_of_work(database, command_actor(), None, None) as uow:
        tenant = await tenants.create_without_key(
            uow, terms.name, tier="standard", weight=terms.weight, limits=limits
        )
        bounds: KeyChange = {"expires_at": datetime.now(UTC) + timedelta(seconds=life_s)}
        key = await api_keys.create(uow, Operator(tenant.id), "drill", [*terms.scopes], bounds)
    return DrillTenant(tenant.id, key.api_key)


async def end_drill_tenant(database: Database, tenant_id: UUID) -> None:
    """Delete the tenant: its key stops working, and the numbers of its usage stay. Raises `DatabaseUnavailable`."""
    async with unit_of_work(database, command_actor(), None, None) as uow:
        await tenants.delete(uow, tenant_id)
