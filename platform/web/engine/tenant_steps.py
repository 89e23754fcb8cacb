"""Tenants by their share of an engine's steps. An engine knows cache namespaces only; this finds the tenants they belong to.

Invariant: a namespace that belongs to no registered tenant is shown with the others, never by itself.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.engine.messages import TenantSteps
from loraplex.tenants.accounts.tenants import living_ids, weights_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantShare:
    """A tenant's part of the tokens of an engine's steps in the last minute. `waiting`: its requests that have not begun.

    `tenant_id`, `name` and `weight` are None for all tenants that are not listed, together.
    """

    tenant_id: UUID | None
    name: str | None
    weight: float | None
    prefill_tokens: int
    decode_tokens: int
    waiting: int

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens


class TenantNamespaces:
    """Finds tenants by their cache namespaces. The registry is read again whenever a namespace is not known yet."""

    def __init__(self, namespace_of: Callable[[UUID], bytes]) -> None:
        self._namespace_of = namespace_of
        self._tenants: dict[bytes, UUID] = {}

    async def tenants(self, session: AsyncSession, namespaces: Collection[bytes]) -> dict[bytes, UUID]:
        """Return the tenants of these namespaces, as an operator; those of no tenant are missing."""
        if not self._tenants.keys() >= set(namespaces):
            self._tenants = {self._namespace_of(each): each for each in await living_ids(session)}
        return {each: self._tenants[each] for each in namespaces if each in self._tenants}


async def tenant_shares(
    session: AsyncSession, steps: Sequence[TenantSteps], namespaces: TenantNamespaces
) -> tuple[TenantShare, ...]:
    """Name the tenants of `steps`, the largest first; what belongs to no registered tenant is the last entry."""
    found = await namespaces.tenants(session, [each.namespace for each in steps if each.namespace])
    weights = await weights_of(session, found.values())
    listed, others = list[TenantShare](), list[TenantSteps]()
    for each in steps:
        tenant_id = found.get(each.namespace)
        if tenant_id is None or tenant_id not in weights:
            others.append(each)
            continue
        known = weights[tenant_id]
        listed.append(_share(tenant_id, known.name, known.weight, [each]))
    return (*listed, _share(None, None, None, others)) if others else tuple(listed)


def _share(
    tenant_id: UUID | None, name: str | None, weight: float | None, steps: Sequence[TenantSteps]
) -> TenantShare:
    return TenantShare(
        tenant_id=tenant_id,
        name=name,
        weight=weight,
        prefill_tokens=sum(each.prefill_tokens for each in steps),
        decode_tokens=sum(each.decode_tokens for each in steps),
        waiting=sum(each.waiting for each in steps),
    )
