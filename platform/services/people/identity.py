"""A person with a session of the console: the caller of its pages."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from loraplex.platform.services.actors import Actor


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleSession:
    """A session and its person. `tenant_id` None: the operator area. `tenants`: those that the person may switch to."""

    id: UUID
    user_id: UUID
    email: str
    name: str
    tenant_id: UUID | None
    tenant_name: str | None
    role: str | None
    scopes: frozenset[str]
    operator: bool
    tenants: tuple[tuple[UUID, str], ...]
    csrf_token: str
    created_at: datetime
    expires_at: datetime
    second_factor: bool
    viewing_as_operator: bool = False

    def actor(self, address: str | None, request_id: str | None) -> Actor:
        """Return the person as the author of a change."""
        return Actor("user", self.email, address, request_id)
