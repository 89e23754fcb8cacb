"""Use cases on API keys: create, change, rotate, revoke; by an operator, another key of the tenant, or a member.

Invariant: each writes one audit entry for each key that it creates or changes, without the secret. A key that manages others
grants nothing beyond its own rights, which are read in the same transaction.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from uuid import UUID

from loraplex.tenants import running_requests
from loraplex.tenants.api_keys.delegation import KeyDelegation, MemberKeys, OwnerKeys
from loraplex.tenants.api_keys.records import KeyChange, KeyDocument, NewKeyDocument
from loraplex.tenants.models import ApiKey
from loraplex.tenants.unit_of_work import UnitOfWork

DERIVED: Final = {"last_used_at", "parent_id", "limit_root"}
"""Not in the audit log: its use, and where it stands among others, are no changes of the key itself."""


@dataclass(frozen=True, slots=True)
class Delegated:
    """The right of a key over others of its tenant. Use cases raise `InvalidApiKey` when that key has ended, and `ScopeNotHeld`
    or `BoundNotHeld` for what it does not have itself.
    """

    tenant_id: UUID
    api_key_id: UUID

    def keys(self, uow: UnitOfWork) -> KeyDelegation:
        return KeyDelegation(uow.session, self.tenant_id, self.api_key_id)


@dataclass(frozen=True, slots=True)
class Member:
    """The right of a person whose role in the tenant has `scopes`. Use cases raise `ScopeNotHeld` for what the role lacks."""

    tenant_id: UUID
    scopes: Iterable[str]

    def keys(self, uow: UnitOfWork) -> MemberKeys:
        return MemberKeys(uow.session, self.tenant_id, self.scopes, uow.actor.name)


@dataclass(frozen=True, slots=True)
class Operator:
    """The right of an operator, who may manage every key. `tenant_id` None: the keys of operators. `environment`: `live` or
    `test`, of the keys that a tenant gets.
    """

    tenant_id: UUID | None
    environment: str = "live"

    def keys(self, uow: UnitOfWork) -> OwnerKeys:
        return OwnerKeys(uow.session, self.tenant_id, uow.actor.kind, self.environment)


KeyAuthority: TypeAlias = Delegated | Member | Operator
"""The right to manage the keys of one owner: a value, which a use case binds to its unit of work by `keys`."""


async def create(
    uow: UnitOfWork,
    authority: KeyAuthority,
    name: str,
    scopes: Sequence[str],
    bounds: KeyChange | None = None,
) -> NewKeyDocument:
    """Create a key. `bounds`: its expiry and networks; where absent none, or those of the key that manages.

    Raises `InvalidField`, `CountReached`.
    """
    issued = await authority.keys(uow).create(name, scopes, bounds)
    await _record(uow, "key.create", issued.record, None)
    return NewKeyDocument.of(issued.record, api_key=issued.plaintext)


async def change(
    uow: UnitOfWork, authority: KeyAuthority, key_id: str, change: KeyChange, *, seen: int | None = None
) -> KeyDocument:
    """Change the named fields of a key. `seen`: the revision that the author has read, None for any.

    Raises `KeyNotFound`, `RevisionMoved`, `KeyEnded`, `InvalidField`.
    """
    keys = authority.keys(uow)
    before = _snapshot(await keys.locked(key_id))
    record = await keys.change(key_id, change, seen)
    await _record(uow, "key.change", record, before)
    return KeyDocument.of(record)


async def rotate(uow: UnitOfWork, authority: KeyAuthority, key_id: str, grace_seconds: int) -> NewKeyDocument:
    """Replace a key by a new one with the same rights; the old one goes on for `grace_seconds` (at most 30 days).

    Raises `KeyNotFound`, `KeyEnded`, `InvalidField`, `CountReached`.
    """
    keys = authority.keys(uow)
    old = await keys.locked(key_id)
    before = _snapshot(old)
    issued = await keys.rotate(key_id, grace_seconds)
    await _record(uow, "key.rotate", old, before)
    await _record(uow, "key.create", issued.record, None)
    return NewKeyDocument.of(issued.record, api_key=issued.plaintext)


async def revoke(
    uow: UnitOfWork, authority: KeyAuthority, key_id: str, *, end_running: bool = False
) -> KeyDocument:
    """End a key at once. `end_running`: what runs with it ends too, on every gateway; a key of operators runs nothing.

    Raises `KeyNotFound`.
    """
    keys = authority.keys(uow)
    found = await keys.locked(key_id)
    before, shown = _snapshot(found), KeyDocument.of(found)
    record = await keys.revoke(key_id)
    more = {"end_running": True} if end_running else {}
    await _record(uow, "key.revoke", record, before, **more)
    if end_running and record.tenant_id is not None:
        await running_requests.end(uow.session, record.tenant_id, api_key_id=record.id)
    # The flush has made the row forget the public ids of other keys.
    return shown.model_copy(update={"revoked_at": record.revoked_at, "revision": record.revision})


async def _record(
    uow: UnitOfWork, action: str, record: ApiKey, before: Mapping[str, Any] | None, **more: Any
) -> None:
    after = {**_snapshot(record), **more}
    await uow.audit.record(action, f"keys/{record.key_id}", before, after, tenant_id=record.tenant_id)


def _snapshot(record: ApiKey) -> dict[str, Any]:
    """Return a key's fields for the audit log."""
    return KeyDocument.of(record).model_dump(mode="json", exclude=DERIVED)
