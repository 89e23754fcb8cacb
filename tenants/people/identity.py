"""Who is signed in to the console, and what the person may do there."""

import hashlib
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from loraplex.tenants.actors import Actor, operator_actor
from loraplex.tenants.people.roles import VIEWING_SCOPES, scopes_of
from loraplex.tenants.people.session_rows import ABSOLUTE, FoundSession

CSRF_DOMAIN = b"loraplex/csrf/v1\0"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleSession:
    """A signed-in person in one tenant, or in the operator's area: there `tenant_id`, `tenant_name` and `role` are None.

    `scopes` include those they imply; in the operator's area: `operator`. `operator`: the person may enter that area.
    `by_link_only`: the person has neither a password nor an identity of a provider. `tenants`: those the person may switch to.
    `second_factor`: the sign-in was confirmed by a code. `viewing_as_operator`: an operator looks into the tenant, read-only.
    `adapters` and `keys`: how many adapters, and keys that work, the tenant has.
    """

    id: UUID
    user_id: UUID
    email: str
    name: str
    tenant_id: UUID | None
    tenant_name: str | None
    role: str | None
    scopes: frozenset[str]
    operator: bool
    by_link_only: bool
    tenants: tuple[tuple[UUID, str], ...]
    csrf_token: str = field(repr=False)
    created_at: datetime
    expires_at: datetime
    second_factor: bool
    viewing_as_operator: bool = False
    adapters: int = 0
    keys: int = 0

    @property
    def signed_in_at(self) -> datetime:
        """When the person signed in. A switch of the tenant and a renewed token keep it, as they keep the absolute end."""
        return self.expires_at - ABSOLUTE

    def actor(self, address: str | None, request_id: str | None) -> Actor:
        """Return the person as the author of a change; an operator, also one who looks into a tenant, as an operator, whose
        address tenants do not see.
        """
        if self.tenant_id is None or self.viewing_as_operator:
            return operator_actor(self.email, address, request_id)
        return person_actor(self.email, address, request_id)


def person_actor(email: str, address: str | None, request_id: str | None = None) -> Actor:
    """Return a person of the console, by the email address, as the author of a change."""
    return Actor("user", email, address, request_id)


def console_session(found: FoundSession, token: str) -> ConsoleSession:
    """Return the session of this token as the console sees it."""
    viewing = found.viewing
    return ConsoleSession(
        id=found.id,
        user_id=found.user_id,
        email=found.email,
        name=found.name,
        tenant_id=found.tenant_id,
        tenant_name=found.tenant_name,
        role=None if viewing else found.role,
        scopes=VIEWING_SCOPES if viewing else scopes_of(found.role),
        operator=found.is_operator,
        by_link_only=found.by_link_only,
        tenants=tuple((each.tenant_id, each.name) for each in found.tenants),
        csrf_token=hashlib.sha256(CSRF_DOMAIN + token.encode()).hexdigest(),
        created_at=found.created_at,
        expires_at=found.expires_at,
        second_factor=found.second_factor,
        viewing_as_operator=viewing,
        adapters=found.adapters,
        keys=found.keys,
    )
