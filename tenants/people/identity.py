"""Who is signed in to the console, and what the person may do there."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from loraplex.tenants.actors import Actor

ABSOLUTE: Final = timedelta(days=7)
"""The time after which a session ends in any case."""


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
    last_seen_at: datetime
    expires_at: datetime
    second_factor: bool
    viewing_as_operator: bool
    adapters: int
    keys: int

    @property
    def signed_in_at(self) -> datetime:
        """When the person signed in. A switch of the tenant and a renewed token keep it, as they keep the absolute end."""
        return self.expires_at - ABSOLUTE

    def actor(self, address: str | None, request_id: str | None) -> Actor:
        """Return the person as the author of a change; an operator, also one who looks into a tenant, as an operator, whose
        address tenants do not see.
        """
        if self.tenant_id is None or self.viewing_as_operator:
            return Actor("operator", self.email, address, request_id)
        return person_actor(self.email, address, request_id)


def person_actor(email: str, address: str | None, request_id: str | None = None) -> Actor:
    """Return a person of the console, by the email address, as the author of a change."""
    return Actor("user", email, address, request_id)
