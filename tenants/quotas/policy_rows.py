"""A tenant's limits as PostgreSQL has them. Invariant: however many there are, they are read in bounded steps between which
other tenants' requests go on; what can admit no request any more has none.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import fields
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Row, Select, and_, exists, func, or_, select

from loraplex.tenants.models import Adapter, ApiKey, Quota, Tenant
from loraplex.tenants.quotas.limits import NO_LIMITS, Limits
from loraplex.tenants.quotas.policies import TenantPolicy

ROWS_AT_ONCE: Final = 500
# Gateways end keys by their own clocks, and admit by what they read a moment before.
KEPT_AFTER_EXPIRY: Final = timedelta(days=1)
LIMIT_NAMES: Final = tuple(field.name for field in fields(Limits))


def policy_rows(tenant_id: UUID) -> Select[Any]:
    """One row per subject that has limits, at least one: the epoch, whose they are, and the limits in `LIMIT_NAMES`' order."""
    ended = or_(ApiKey.revoked_at.is_not(None), ApiKey.expires_at < func.now() - KEPT_AFTER_EXPIRY)
    ended_key = exists(ApiKey.id).where(ApiKey.id == Quota.api_key_id, ended)
    deleted = Adapter.deleted_at.is_not(None)
    deleted_adapter = exists(Adapter.id).where(Adapter.id == Quota.adapter_id, deleted)
    limits = [getattr(Quota, name) for name in LIMIT_NAMES]
    return (
        select(Tenant.policy_epoch, Quota.id, Quota.api_key_id, Quota.adapter_id, *limits)
        .outerjoin(Quota, and_(Quota.tenant_id == Tenant.id, ~ended_key, ~deleted_adapter))
        .where(Tenant.id == tenant_id)
    )


async def policy_of(parts: AsyncIterator[Sequence[Row[Any]]]) -> TenantPolicy | None:
    """None without any row: there is no such tenant."""
    policy_epoch, tenant = None, NO_LIMITS
    keys: dict[UUID, Limits] = {}
    adapters: dict[UUID, Limits] = {}
    async for part in parts:
        for row in part:
            policy_epoch, quota_id, api_key_id, adapter_id, *values = tuple(row)
            if quota_id is None:
                continue
            limits = Limits(**dict(zip(LIMIT_NAMES, values, strict=True)))
            if api_key_id is not None:
                keys[api_key_id] = limits
            elif adapter_id is not None:
                adapters[adapter_id] = limits
            else:
                tenant = limits
    return None if policy_epoch is None else TenantPolicy(policy_epoch, tenant, keys, adapters)
