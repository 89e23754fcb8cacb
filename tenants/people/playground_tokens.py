"""Bearers of ten minutes with which the console's playground and uploader call the API as the person who is signed in."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from loraplex.tenants.errors import ScopeNotHeld
from loraplex.tenants.people.console_keys import issue_console_key
from loraplex.tenants.people.identity import ConsoleSession
from loraplex.tenants.unit_of_work import UnitOfWork

LIFETIME: Final = timedelta(minutes=10)
NAMES: Final = {"inference": "playground", "adapters:write": "uploader"}
SCOPES: Final = {"inference": ("inference",), "adapters:write": ("adapters:read", "adapters:write")}


@dataclass(frozen=True, slots=True)
class ConsoleToken:
    """A key of the API that ends by itself at `expires_at`."""

    api_key: str = field(repr=False)
    expires_at: datetime


async def issue_console_token(
    uow: UnitOfWork, session: ConsoleSession, scope: Literal["inference", "adapters:write"]
) -> ConsoleToken:
    """Issue a bearer for the playground (`inference`) or the uploader (`adapters:write`) of the session's tenant.

    It is no change of what the tenant has, so it leaves no audit entry. It may end an older one. Raises `ScopeNotHeld`.
    """
    if session.tenant_id is None or scope not in session.scopes:
        raise ScopeNotHeld(f"this needs a role with the scope `{scope}`")
    ends = datetime.now(UTC) + LIFETIME
    issued = await issue_console_key(
        uow.session, session.tenant_id, NAMES[scope], SCOPES[scope], session.email, ends
    )
    uow.notify_of([session.tenant_id])
    return ConsoleToken(issued.plaintext, ends)
