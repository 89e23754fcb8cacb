"""Limits of tenants, keys and adapters: read from PostgreSQL in bounded pages and cached for one policy epoch.

Invariant: limits of one epoch are never applied to a request of another; reading a tenant's many limits does not block others.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeAlias
from uuid import UUID

from cachetools import LRUCache
from sqlalchemy import Row, Select, exists, func, join, or_, outerjoin, select, true

from loraplex.tenants.errors import PolicyStale
from loraplex.tenants.models import Adapter, ApiKey, Quota, Tenant
from loraplex.tenants.quotas.limits import NO_LIMITS, QuotaLimits, Subject
from loraplex.tenants.single_flight import SingleFlight

MAX_TENANTS = 10_000
Load: TypeAlias = Callable[[], Coroutine[Any, Any, "TenantPolicy"]]


async def unbounded(load: Load) -> "TenantPolicy":
    """Run a load without a bound."""
    return await load()


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """A tenant's limits at all levels; a key or adapter without an entry has no limits. `roots`: of each key below another one that
    has limits, that one.
    """

    policy_epoch: int
    tenant: QuotaLimits = NO_LIMITS
    keys: Mapping[UUID, QuotaLimits] = field(default_factory=dict)
    adapters: Mapping[UUID, QuotaLimits] = field(default_factory=dict)
    roots: Mapping[UUID, UUID] = field(default_factory=dict)
    unknown_parameters: str = "default"

    def subjects(self, tenant_id: UUID, api_key_id: UUID, adapter_id: UUID | None) -> tuple[Subject, ...]:
        """The subjects that one request counts for: all levels, limited or not, since a limit may be set later in a period."""
        subjects = [Subject("tenant", tenant_id, self.tenant)]
        if root := self.roots.get(api_key_id):
            subjects.append(Subject("group", root, self.keys.get(root, NO_LIMITS)))
        subjects.append(Subject("key", api_key_id, self.keys.get(api_key_id, NO_LIMITS)))
        if adapter_id is not None:
            subjects.append(Subject("adapter", adapter_id, self.adapters.get(adapter_id, NO_LIMITS)))
        return tuple(subjects)


class Policies:
    """A cache of the policies last used; `load` reads one from the database. `bounded` runs the loads that requests wait for.

    A cached policy is used however long PostgreSQL is away: the caller's epoch says that it is the right one.
    """

    def __init__(
        self,
        load: Callable[[UUID], Awaitable[TenantPolicy]],
        max_tenants: int = MAX_TENANTS,
        bounded: Callable[[Load], Coroutine[Any, Any, TenantPolicy]] = unbounded,
    ) -> None:
        self._load = load
        self._bounded = bounded
        self._cached: LRUCache[UUID, TenantPolicy] = LRUCache(max_tenants)
        self._loads = SingleFlight[TenantPolicy]()

    async def of(self, tenant_id: UUID, policy_epoch: int) -> TenantPolicy:
        """The tenant's limits at that epoch.

        Raises `PolicyStale` when there is a newer one, `TenantNotFound`, `DatabaseUnavailable` when they must be read and
        PostgreSQL is away.
        """
        cached = self._cached.get(tenant_id)
        if cached is None or cached.policy_epoch < policy_epoch:
            # By epoch too: a load for an older one may have read before the change.
            load = partial(self._bounded, partial(self.refresh, tenant_id))
            cached = await self._loads.run((tenant_id, policy_epoch), load)
        if cached.policy_epoch != policy_epoch:
            raise PolicyStale(f"the policy of the caller's tenant has changed since epoch {policy_epoch}")
        return cached

    async def refresh(self, tenant_id: UUID) -> TenantPolicy:
        """The newest limits. Raises `TenantNotFound`."""
        return self._keep(tenant_id, await self._load(tenant_id))

    def _keep(self, tenant_id: UUID, policy: TenantPolicy) -> TenantPolicy:
        cached = self._cached.get(tenant_id)
        if cached is not None and cached.policy_epoch > policy.policy_epoch:
            return cached
        self._cached[tenant_id] = policy
        return policy


ROWS_AT_ONCE: Final = 500
# Gateways expire keys by their own clocks, and admit with policies that they read a moment before.
KEPT_AFTER_EXPIRY: Final = timedelta(days=1)
LIMIT_NAMES: Final = tuple(field.name for field in fields(QuotaLimits))


def policy_rows(tenant_id: UUID) -> Select[Any]:
    """One row per subject with limits and per key below a root, at least one row: the epoch, the tenant's choice for unknown
    parameters, the key, its root, the adapter, whether there are limits, and these in the order of `LIMIT_NAMES`.
    """
    ended = or_(ApiKey.revoked_at.is_not(None), ApiKey.expires_at < func.now() - KEPT_AFTER_EXPIRY).is_(True)
    below = (
        select(ApiKey.id, ApiKey.limit_root)
        .where(ApiKey.tenant_id == tenant_id, ApiKey.limit_root != ApiKey.id, ~ended)
        .subquery()
    )
    ended_key = exists(ApiKey.id).where(ApiKey.id == Quota.api_key_id, ended)
    # An ended root goes on binding the keys below it.
    is_root = exists(below.c.id).where(below.c.limit_root == Quota.api_key_id)
    deleted_adapter = exists(Adapter.id).where(
        Adapter.id == Quota.adapter_id, Adapter.deleted_at.is_not(None)
    )
    quota = (
        select(Quota)
        .where(Quota.tenant_id == tenant_id, or_(~ended_key, is_root), ~deleted_adapter)
        .subquery()
    )
    subjects = join(quota, below, quota.c.api_key_id == below.c.id, full=True)
    key = func.coalesce(quota.c.api_key_id, below.c.id)
    own, limits = (Tenant.policy_epoch, Tenant.unknown_parameters), [quota.c[name] for name in LIMIT_NAMES]
    columns = *own, key, below.c.limit_root, quota.c.adapter_id, quota.c.id.is_not(None), *limits
    return select(*columns).select_from(outerjoin(Tenant, subjects, true())).where(Tenant.id == tenant_id)


async def policy_of(parts: AsyncIterator[Sequence[Row[Any]]]) -> TenantPolicy | None:
    """The policy of these rows; None without rows: there is no such tenant."""
    policy_epoch, unknown, tenant = None, "default", NO_LIMITS
    keys: dict[UUID, QuotaLimits] = {}
    adapters: dict[UUID, QuotaLimits] = {}
    roots: dict[UUID, UUID] = {}
    async for part in parts:
        for row in part:
            policy_epoch, unknown, api_key_id, limit_root, adapter_id, has_limits, *values = tuple(row)
            if limit_root is not None:
                roots[api_key_id] = limit_root
            if not has_limits:
                continue
            limits = QuotaLimits(**dict(zip(LIMIT_NAMES, values, strict=True)))
            if api_key_id is not None:
                keys[api_key_id] = limits
            elif adapter_id is not None:
                adapters[adapter_id] = limits
            else:
                tenant = limits
    return (
        None if policy_epoch is None else TenantPolicy(policy_epoch, tenant, keys, adapters, roots, unknown)
    )
