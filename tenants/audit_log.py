"""The audit log: who changed what, from where. Invariant: an entry is written in the transaction of its change, and contains
no secret, whatever the caller passes.
"""

import ipaddress
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.actors import Actor
from loraplex.tenants.ids import uuid7
from loraplex.tenants.models import ApiKey, AuditEntry

REMOVED: Final = "(removed)"
SECRET_FIELDS: Final = frozenset(
    {
        *("api_key", "plaintext", "secret", "secret_sha256", "password", "passphrase", "token"),
        *("authorization", "credential", "credentials", "cookie", "private_key", "signature"),
        *("prompt", "messages", "schema", "content"),
    }
)
"""Fields whose values never enter the log: credentials, and what tenants send to models."""
# Keys with or without their checksum: a key mistyped into a name is still mostly a key.
_KEY: Final = re.compile(r"lpx_(?:live|test|op)_[A-Za-z0-9_-]+")
_MAX_TEXT: Final = 1000


class AuditRepository:
    """Writes the entries of one actor in one session. `tenant_id` None: entries concern no tenant unless they name one."""

    def __init__(self, session: AsyncSession, actor: Actor, tenant_id: UUID | None) -> None:
        self._session = session
        self._actor = actor
        self._tenant_id = tenant_id
        self.tenants: set[UUID] = set()
        """The tenants whose entries were written."""

    async def record(
        self,
        action: str,
        target: str,
        before: Mapping[str, Any] | None = None,
        after: Mapping[str, Any] | None = None,
        *,
        tenant_id: UUID | None = None,
    ) -> None:
        """`action` is `<noun>.<verb>`, `target` the path of what changed, such as `adapters/support/aliases/production`.

        Only the fields of `before` and `after` that differ are kept: None before a creation, None after a deletion.
        """
        owner = tenant_id or self._tenant_id
        old, new = changed(before, after)
        entry = AuditEntry(
            id=uuid7(),
            tenant_id=owner,
            actor_kind=self._actor.kind,
            actor=self._actor.name,
            action=action,
            target=_plain(target),
            before=old,
            after=new,
            address=_address(self._actor.address),
            request_id=self._actor.request_id,
        )
        self._session.add(entry)
        await self._session.flush()
        if owner is not None:
            self.tenants.add(owner)


async def author_behind(session: AsyncSession, actor: Actor) -> Actor:
    """Return the person to whom the console issued the key of `actor`, for its pages; `actor` where that is no such key."""
    if actor.kind != "key":
        return actor
    of_console = ApiKey.key_id == actor.name, ApiKey.kind == "console"
    person = await session.scalar(select(ApiKey.created_by).where(*of_console))
    return actor if person is None else replace(actor, kind="user", name=person)


def changed(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Both as JSON without secrets, and without the fields that are equal in both."""
    if before is None or after is None:
        return _visible(before), _visible(after)
    same = {name for name in before.keys() & after.keys() if before[name] == after[name]}
    return _visible(before, same), _visible(after, same)


def _visible(fields: Mapping[str, Any] | None, hidden: Collection[str] = ()) -> dict[str, Any] | None:
    if fields is None:
        return None
    return {name: _shown(name, value) for name, value in fields.items() if name not in hidden}


def _shown(name: str, value: Any) -> Any:
    return REMOVED if name.lower() in SECRET_FIELDS else _plain(value)


def _plain(value: Any) -> Any:
    """`value` as JSON, with everything that looks like a key removed."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): _shown(str(name), each) for name, each in value.items()}
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, set | frozenset):
        return sorted(_plain(each) for each in value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return _KEY.sub(REMOVED, str(value))[:_MAX_TEXT]


def _address(text: str | None) -> str | None:
    """The text if it is an IP address, without its zone; None otherwise, as for the peer of a unix socket."""
    candidate = (text or "").partition("%")[0]
    try:
        return str(ipaddress.ip_address(candidate))
    except ValueError:
        return None
