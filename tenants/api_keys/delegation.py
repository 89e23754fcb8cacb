"""Keys and people that manage keys of their tenant, and the restrictions (networks, expiry) that bound both.

Invariant: a key that creates, rotates or changes another grants no scope, network, time or limit beyond its own, read in the
same transaction; a revoked key manages nothing. A person manages no key with a scope that the person's role lacks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.api_keys.keys import IssuedKey, KeyLimits, KeyRepository, check_expiry, is_live
from loraplex.tenants.api_keys.networks import are_covered, check_networks
from loraplex.tenants.api_keys.records import KeyChange
from loraplex.tenants.errors import BoundNotHeld, ExpiredKey, RevokedKey, ScopeNotHeld
from loraplex.tenants.models import ApiKey
from loraplex.tenants.scopes import KEYS_WRITE, OPERATOR_SCOPES, TENANT_SCOPES, effective_scopes


@dataclass(frozen=True, slots=True)
class KeyRestrictions:
    """Networks and expiry of a key. `networks` (): from everywhere; `expires_at` None: no expiry."""

    networks: tuple[str, ...]
    expires_at: datetime | None

    @classmethod
    def of(cls, record: ApiKey) -> "KeyRestrictions":
        return cls(tuple(record.allowed_cidrs), record.expires_at)

    def changed(self, change: KeyChange) -> "KeyRestrictions":
        """The restrictions after `change`. Raises `InvalidField`."""
        networks, expires_at = self.networks, self.expires_at
        if "allowed_cidrs" in change:
            networks = tuple(check_networks("allowed_cidrs", change["allowed_cidrs"]))
        if "expires_at" in change and change["expires_at"] != expires_at:
            expires_at = check_expiry(change["expires_at"])
        return KeyRestrictions(networks, expires_at)

    def exceeded_by(self, other: "KeyRestrictions") -> str | None:
        """The field in which `other` allows more, if any."""
        if self.networks and not (other.networks and are_covered(other.networks, self.networks)):
            return "allowed_cidrs"
        if self.expires_at is not None and (other.expires_at is None or other.expires_at > self.expires_at):
            return "expires_at"
        return None

    def require(self, granted: "KeyRestrictions") -> None:
        """Raise `BoundNotHeld` if `granted` allows more than these restrictions of the managing key."""
        match self.exceeded_by(granted):
            case "allowed_cidrs":
                raise BoundNotHeld(
                    "allowed_cidrs",
                    f"allowed_cidrs must lie within those of the key that manages: {', '.join(self.networks)}",
                )
            case "expires_at":
                end = "" if self.expires_at is None else self.expires_at.isoformat()
                raise BoundNotHeld(
                    "expires_at", f"expires_at must not be later than that of the key that manages: {end}"
                )


class KeyDelegation:
    """Manages keys on behalf of another key. `manager` is the id of that key.

    Every method raises `InvalidApiKey` when that key has ended.
    """

    def __init__(self, session: AsyncSession, tenant_id: UUID, manager: UUID) -> None:
        self._session = session
        self._tenant_id = tenant_id
        self._manager_id = manager
        self._keys = KeyRepository(session)

    async def create(
        self,
        name: str,
        scopes: Sequence[str],
        bounds: KeyChange | None = None,
    ) -> IssuedKey:
        """Create a key in the manager's environment, with the manager's limits, below it. `expires_at` and `allowed_cidrs` of `bounds`
        apply; an absent one is the manager's. Raises `ScopeNotHeld`, `BoundNotHeld`, `InvalidField`, `CountReached`.
        """
        manager = await self._manager()
        require_held(manager, scopes)
        own = KeyRestrictions.of(manager)
        granted = own.changed(bounds or {})
        own.require(granted)
        issued = await self._keys.create(
            self._tenant_id,
            name,
            scopes,
            manager.environment,
            granted.expires_at,
            allowed_cidrs=granted.networks,
            created_by=manager.key_id,
            parent=manager,
        )
        await self._keys.copy_limits(manager, issued.record)
        return issued

    async def locked(self, key_id: str) -> ApiKey:
        """The key, locked until this transaction ends. Raises `KeyNotFound`, `ScopeNotHeld`."""
        return (await self._over(key_id))[1]

    async def change(self, key_id: str, change: KeyChange, expected: int | None) -> ApiKey:
        """Raises `ScopeNotHeld`, `BoundNotHeld` and what `KeyRepository.change` does."""
        manager, record = await self._over(key_id)
        require_held(manager, change.get("scopes", ()))
        before = KeyRestrictions.of(record)
        after = before.changed(change)
        if before.exceeded_by(after) or effective_scopes(change.get("scopes", ())) - effective_scopes(
            record.scopes
        ):
            KeyRestrictions.of(manager).require(after)
            await self._require_limits(manager, record)
        return await self._keys.change(self._tenant_id, key_id, change, expected)

    async def rotate(self, key_id: str, grace_seconds: int) -> IssuedKey:
        """Raises `ScopeNotHeld`, `BoundNotHeld` for a key that allows more, and what `KeyRepository.rotate` does."""
        manager, record = await self._over(key_id)
        KeyRestrictions.of(manager).require(KeyRestrictions.of(record))
        await self._require_limits(manager, record)
        return await self._keys.rotate(self._tenant_id, key_id, grace_seconds, created_by=manager.key_id)

    async def revoke(self, key_id: str) -> ApiKey:
        """Raises `ScopeNotHeld` and what `KeyRepository.revoke` does."""
        await self._over(key_id)
        return await self._keys.revoke(self._tenant_id, key_id)

    async def limits_for(self, key_id: str, limits: KeyLimits) -> KeyLimits:
        """The limits that a key gets: `limits`, and where these are null those that bind the manager, by its group too: so it lifts
        no limit that it shares. Locks the key until the transaction ends.

        Raises `ScopeNotHeld`, `KeyNotFound`, and `BoundNotHeld` for a limit above the manager's.
        """
        manager, _ = await self._over(key_id)
        own = await self._keys.bounds(manager)
        granted = {name: own[name] if value is None else value for name, value in limits.items()}
        require_within(granted, own)
        return granted

    async def require_right_over_people(self, scopes: Iterable[str]) -> None:
        """Raise unless the key may give a person a role with `scopes`: `ScopeNotHeld`, and `BoundNotHeld` for a key with networks or
        limits, its group's too: people sign in from everywhere, and keys that they make have no limits.
        """
        manager = await self._manager()
        require_held(manager, scopes)
        if manager.allowed_cidrs:
            raise BoundNotHeld(
                "allowed_cidrs",
                f"this key works from {', '.join(manager.allowed_cidrs)} only, and people sign in from everywhere: "
                "an admin gives roles in the console, or a key without networks",
            )
        for name, limit in (await self._keys.bounds(manager)).items():
            if limit is not None:
                raise BoundNotHeld(
                    name,
                    f"{name} of this key or its group is {limit}, and keys that people make have no limits: "
                    "an admin gives roles in the console, or a key without limits",
                )

    async def _require_limits(self, manager: ApiKey, record: ApiKey) -> None:
        require_within(await self._keys.limits(record), await self._keys.bounds(manager))

    async def _over(self, key_id: str) -> tuple[ApiKey, ApiKey]:
        """The managing key, and the key it may manage."""
        manager = await self._manager()
        record = await self._keys.locked(self._tenant_id, key_id)
        require_held(manager, record.scopes)
        return manager, record

    async def _manager(self) -> ApiKey:
        """The current managing key, locked until the transaction ends."""
        await self._keys.lock(self._tenant_id)
        query = select(ApiKey).where(ApiKey.tenant_id == self._tenant_id, ApiKey.id == self._manager_id)
        found = await self._session.scalars(query.execution_options(populate_existing=True))
        record = found.one_or_none()
        if record is None or record.revoked_at is not None:
            raise RevokedKey("the API key is revoked")
        if not is_live(record, datetime.now(UTC)):
            raise ExpiredKey("the API key has expired")
        require_held(record, [KEYS_WRITE])
        return record


class OwnerKeys:
    """Manages all keys of an owner without a bound: of a tenant, or for None of the operators. `environment`: of the keys that a
    tenant gets.
    """

    def __init__(
        self, session: AsyncSession, tenant_id: UUID | None, created_by: str, environment: str = "live"
    ) -> None:
        self._tenant_id = tenant_id
        self._created_by = created_by
        self._environment = environment
        self._keys = KeyRepository(session)

    async def create(self, name: str, scopes: Sequence[str], bounds: KeyChange | None = None) -> IssuedKey:
        """Create a key with no networks and expiry but those given. Raises `InvalidField`, `CountReached`."""
        given = bounds or KeyChange()
        return await self._keys.create(
            self._tenant_id,
            name,
            scopes,
            self._environment,
            given.get("expires_at"),
            allowed_cidrs=given.get("allowed_cidrs", ()),
            created_by=self._created_by,
        )

    async def locked(self, key_id: str) -> ApiKey:
        """The key, locked until this transaction ends. Raises `KeyNotFound`."""
        return await self._keys.locked(self._tenant_id, key_id)

    async def change(self, key_id: str, change: KeyChange, expected: int | None) -> ApiKey:
        """Raises what `KeyRepository.change` does."""
        return await self._keys.change(self._tenant_id, key_id, change, expected)

    async def rotate(self, key_id: str, grace_seconds: int) -> IssuedKey:
        """Raises what `KeyRepository.rotate` does."""
        return await self._keys.rotate(self._tenant_id, key_id, grace_seconds, created_by=self._created_by)

    async def revoke(self, key_id: str) -> ApiKey:
        """Raises what `KeyRepository.revoke` does."""
        return await self._keys.revoke(self._tenant_id, key_id)

    async def limits_for(self, key_id: str, limits: KeyLimits) -> KeyLimits:
        """The limits that a key gets: `limits`. Locks the key until the transaction ends. Raises `KeyNotFound`."""
        await self.locked(key_id)
        return limits


class MemberKeys(OwnerKeys):
    """Manages keys on behalf of a person whose role has `scopes`. Keys that the person creates have the person's email address
    as their author, and no limits. Every method raises `ScopeNotHeld` for what the role lacks.
    """

    def __init__(
        self, session: AsyncSession, tenant_id: UUID, scopes: Iterable[str], created_by: str
    ) -> None:
        super().__init__(session, tenant_id, created_by)
        self._scopes = effective_scopes(scopes)

    async def create(self, name: str, scopes: Sequence[str], bounds: KeyChange | None = None) -> IssuedKey:
        self._require([KEYS_WRITE, *scopes])
        return await super().create(name, scopes, bounds)

    async def locked(self, key_id: str) -> ApiKey:
        record = await super().locked(key_id)
        self._require([KEYS_WRITE, *record.scopes])
        return record

    async def change(self, key_id: str, change: KeyChange, expected: int | None) -> ApiKey:
        await self.locked(key_id)
        self._require(change.get("scopes", ()))
        return await super().change(key_id, change, expected)

    async def rotate(self, key_id: str, grace_seconds: int) -> IssuedKey:
        await self.locked(key_id)
        return await super().rotate(key_id, grace_seconds)

    async def revoke(self, key_id: str) -> ApiKey:
        await self.locked(key_id)
        return await super().revoke(key_id)

    def _require(self, scopes: Iterable[str]) -> None:
        require_scopes(self._scopes, scopes, "a role")


def require_within(granted: KeyLimits, own: KeyLimits) -> None:
    """Raises `BoundNotHeld` if `granted` allows more than `own`, the limits of the managing key."""
    for name, bound in own.items():
        value = granted[name]
        if bound is not None and (value is None or value > bound):
            raise BoundNotHeld(name, f"{name} must be at most that of the key that manages, which is {bound}")


def require_held(manager: ApiKey, scopes: Iterable[str]) -> None:
    """Raises `ScopeNotHeld`; a text that is no scope at all is left to `check_scopes`."""
    require_scopes(effective_scopes(manager.scopes), scopes, "a key")


def require_scopes(own: frozenset[str], scopes: Iterable[str], of: str) -> None:
    """Raises `ScopeNotHeld` for a scope that is not among `own`, those of the key or role `of` which manages."""
    if lacking := sorted(effective_scopes(scopes) & (TENANT_SCOPES | OPERATOR_SCOPES) - own):
        raise ScopeNotHeld(f"this needs {of} that itself has the scope `{lacking[0]}`")
