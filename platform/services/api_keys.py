"""Use cases on API keys: create, change, rotate, revoke; by an operator, another key of the tenant, or a member.

Invariant: each writes one audit entry for each key that it creates or changes, without the secret. A key that manages others
grants nothing beyond its own rights, which are read in the same transaction.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol
from uuid import UUID

from loraplex.tenants.admission import fences
from loraplex.tenants.api_keys.delegation import KeyDelegation, MemberKeys
from loraplex.tenants.api_keys.keys import IssuedKey, KeyChange, KeyRepository
from loraplex.tenants.models import ApiKey
from loraplex.tenants.rfc3339 import utc_text
from loraplex.tenants.unit_of_work import UnitOfWork

SNAPSHOT: Final = ("name", "environment", "scopes", "allowed_cidrs", "created_by")
TIMES: Final = ("created_at", "expires_at", "revoked_at")


class KeyAuthority(Protocol):
    """The right to manage the keys of one owner. Each method raises `KeyNotFound` for a key of another owner."""

    async def create(self, name: str, scopes: Sequence[str], bounds: KeyChange | None = None) -> IssuedKey:
        """Issue a key. Raises `InvalidField`, `CountReached`."""
        ...

    async def locked(self, key_id: str) -> ApiKey:
        """Return the key, locked until the transaction ends."""
        ...

    async def change(self, key_id: str, change: KeyChange, expected: int | None) -> ApiKey:
        """Change the named fields. `expected`: the revision it must have, None for any. Raises `RevisionMoved`, `KeyEnded`."""
        ...

    async def rotate(self, key_id: str, grace_seconds: int) -> IssuedKey:
        """Replace the key. Raises `KeyEnded`, `InvalidField`, `CountReached`."""
        ...

    async def revoke(self, key_id: str) -> ApiKey:
        """End the key at once; repeating it changes nothing."""
        ...


def delegated_keys(uow: UnitOfWork, tenant_id: UUID, manager: UUID) -> KeyAuthority:
    """Return the right of the tenant's key `manager`. All of its use cases raise `InvalidApiKey` when that key has ended, and
    `ScopeNotHeld` or `BoundNotHeld` for what it does not have itself.
    """
    return KeyDelegation(uow.session, tenant_id, manager)


def member_keys(uow: UnitOfWork, tenant_id: UUID, scopes: Iterable[str]) -> KeyAuthority:
    """Return the right of the person who is the author of `uow` and whose role in the tenant has `scopes`. All of its use cases
    raise `ScopeNotHeld` for what the role lacks.
    """
    return MemberKeys(uow.session, tenant_id, scopes, uow.actor.name)


class OperatorKeys:
    """The right of an operator, who may manage every key. `tenant_id` None: the keys of operators."""

    def __init__(self, uow: UnitOfWork, tenant_id: UUID | None, environment: str = "live") -> None:
        """`environment`: `live` or `test`, of the keys that a tenant gets."""
        self._keys = KeyRepository(uow.session)
        self._tenant_id = tenant_id
        self._environment = environment
        self._created_by = uow.actor.kind

    async def create(self, name: str, scopes: Sequence[str], bounds: KeyChange | None = None) -> IssuedKey:
        given = bounds or KeyChange()
        return await self._keys.create(
            *(self._tenant_id, name, scopes, self._environment, given.get("expires_at")),
            allowed_cidrs=given.get("allowed_cidrs", ()),
            created_by=self._created_by,
        )

    async def locked(self, key_id: str) -> ApiKey:
        return await self._keys.locked(self._tenant_id, key_id)

    async def change(self, key_id: str, change: KeyChange, expected: int | None) -> ApiKey:
        return await self._keys.change(self._tenant_id, key_id, change, expected)

    async def rotate(self, key_id: str, grace_seconds: int) -> IssuedKey:
        return await self._keys.rotate(self._tenant_id, key_id, grace_seconds, created_by=self._created_by)

    async def revoke(self, key_id: str) -> ApiKey:
        return await self._keys.revoke(self._tenant_id, key_id)


async def create(
    uow: UnitOfWork,
    keys: KeyAuthority,
    name: str,
    scopes: Sequence[str],
    bounds: KeyChange | None = None,
) -> IssuedKey:
    """Create a key. `bounds`: its expiry and networks; where absent none, or those of the key that manages.

    Raises `InvalidField`, `CountReached`.
    """
    issued = await keys.create(name, scopes, bounds)
    await _record(uow, "key.create", issued.record, None)
    return issued


async def change(
    uow: UnitOfWork, keys: KeyAuthority, key_id: str, change: KeyChange, *, seen: int | None = None
) -> ApiKey:
    """Change the named fields of a key. `seen`: the revision that the author has read, None for any.

    Raises `KeyNotFound`, `RevisionMoved`, `KeyEnded`, `InvalidField`.
    """
    before = snapshot(await keys.locked(key_id))
    record = await keys.change(key_id, change, seen)
    await _record(uow, "key.change", record, before)
    return record


async def rotate(uow: UnitOfWork, keys: KeyAuthority, key_id: str, grace_seconds: int) -> IssuedKey:
    """Replace a key by a new one with the same rights; the old one goes on for `grace_seconds` (at most 30 days).

    Raises `KeyNotFound`, `KeyEnded`, `InvalidField`, `CountReached`.
    """
    old = await keys.locked(key_id)
    before = snapshot(old)
    issued = await keys.rotate(key_id, grace_seconds)
    await _record(uow, "key.rotate", old, before)
    await _record(uow, "key.create", issued.record, None)
    return issued


async def revoke(uow: UnitOfWork, keys: KeyAuthority, key_id: str, *, end_running: bool = False) -> ApiKey:
    """End a key at once. `end_running`: what runs with it ends too, on every gateway; a key of operators runs nothing.

    Raises `KeyNotFound`.
    """
    before = snapshot(await keys.locked(key_id))
    record = await keys.revoke(key_id)
    more = {"end_running": True} if end_running else {}
    await _record(uow, "key.revoke", record, before, **more)
    if end_running and record.tenant_id is not None:
        await fences.end_running(uow.session, record.tenant_id, api_key_id=record.id)
    return record


async def _record(
    uow: UnitOfWork, action: str, record: ApiKey, before: Mapping[str, Any] | None, **more: Any
) -> None:
    after = {**snapshot(record), **more}
    await uow.audit.record(action, f"keys/{record.key_id}", before, after, tenant_id=record.tenant_id)


def snapshot(record: ApiKey) -> dict[str, Any]:
    """Return a key's fields for the audit log."""
    return {
        "id": record.key_id,
        **{name: getattr(record, name) for name in SNAPSHOT},
        **{name: utc_text(getattr(record, name)) for name in TIMES},
        "replaced_by": None if record.successor is None else record.successor.key_id,
    }
