"""Issues, finds, changes and checks API keys. Invariants: the plaintext leaves this module once, in `IssuedKey`; the keys of
one tenant change one at a time, and a tenant never has more of them than its quota allows.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias
from uuid import UUID

from sqlalchemy import ColumnElement, ScalarSelect, Select, func, or_, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute, aliased, selectinload, with_expression

from loraplex.tenants.api_keys.key_format import ParsedKey, generate_key, is_key_id, parse_key
from loraplex.tenants.api_keys.networks import check_networks
from loraplex.tenants.api_keys.records import MAX_GRACE_SECONDS, KeyChange, KeyState
from loraplex.tenants.database import default_limits, lock
from loraplex.tenants.errors import (
    CountReached,
    ExpiredKey,
    InvalidField,
    KeyEnded,
    KeyNotFound,
    RevisionMoved,
    RevokedKey,
    TenantSuspended,
    UnknownKey,
)
from loraplex.tenants.models import LIMIT_COLUMNS, ApiKey, Quota
from loraplex.tenants.names import check_key_name
from loraplex.tenants.pages import Slice, sliced
from loraplex.tenants.scopes import check_scopes

LAST_EXPIRY = datetime(3000, 1, 1, tzinfo=UTC)
NO_DIGEST = bytes(32)
KeyLimits: TypeAlias = Mapping[str, int | None]
"""The limits of a key by the names of their columns; None is no limit."""
FIND_KEY = text("SELECT * FROM find_api_key(:key_id)")
MAX_DEPTH = 8
"""The most keys in a row of which each minted the next. A rotation makes no row longer."""
DEPTH = text("""
WITH RECURSIVE above (id, parent_id, depth) AS (
    SELECT id, parent_id, 1 FROM api_keys WHERE id = :id
    UNION ALL
    SELECT p.id, p.parent_id, a.depth + CASE WHEN p.replaced_by = a.id THEN 0 ELSE 1 END
    FROM api_keys p JOIN above a ON p.id = a.parent_id
) SELECT max(depth) FROM above
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthenticatedKey:
    """A key with its tenant's settings, as the database's lookup function returns it.

    An operator's key has no tenant, so the tenant's fields are None. `policy_epoch` is the version of this data.
    """

    api_key_id: UUID
    key_id: str
    environment: str
    secret_sha256: bytes = field(repr=False)
    scopes: list[str]
    allowed_cidrs: list[str]
    expires_at: datetime | None
    revoked_at: datetime | None
    tenant_id: UUID | None
    tenant_name: str | None
    weight: float | None
    tier: str | None
    suspended_at: datetime | None
    policy_epoch: int | None


@dataclass(frozen=True)
class IssuedKey:
    """A new key; `plaintext` is returned once and stored nowhere."""

    record: ApiKey
    plaintext: str = field(repr=False)


class KeyRepository:
    """The keys seen by one session."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def lock(self, tenant_id: UUID | None) -> None:
        """Lock the keys of this tenant against other transactions until this one ends."""
        await lock(self._session, f"keys:{tenant_id or 'operator'}")

    async def create(
        self,
        tenant_id: UUID | None,
        name: str,
        scopes: Iterable[str],
        environment: str = "live",
        expires_at: datetime | None = None,
        *,
        allowed_cidrs: Iterable[str] = (),
        created_by: str | None = None,
        parent: ApiKey | None = None,
    ) -> IssuedKey:
        """Create a key. `tenant_id` None creates an operator's key, whose environment is `op`. `parent`: the key that mints it.

        Raises `InvalidField`, `CountReached`.
        """
        await self._check_room(tenant_id, replaced=False)
        if parent is not None:
            await self._check_depth(parent)
        return await self._issue(
            tenant_id,
            created_by,
            parent,
            environment="op" if tenant_id is None else environment,
            name=name,
            scopes=scopes,
            expires_at=expires_at,
            allowed_cidrs=allowed_cidrs,
        )

    async def find(self, key_id: str) -> AuthenticatedKey | None:
        """The key with that public id and its tenant; also when it is revoked or expired. For writers and operators."""
        if not is_key_id(key_id):
            return None
        row = (await self._session.execute(FIND_KEY, {"key_id": key_id})).one_or_none()
        return None if row is None else AuthenticatedKey(**row._mapping)

    async def authenticate(self, presented: str) -> AuthenticatedKey:
        """The live key of a presented text and its tenant. Raises `InvalidApiKey` or `TenantSuspended`."""
        key = parse_key(presented)
        return check_key(await self.find(key.key_id), key, datetime.now(UTC))

    async def get(self, tenant_id: UUID | None, key_id: str) -> ApiKey:
        """Raises `KeyNotFound`."""
        return await self._one(key_id, of_owner(tenant_id))

    async def list(self, tenant_id: UUID | None) -> list[ApiKey]:
        """A tenant's keys, or the operators' for None; oldest first."""
        return [*await self._session.scalars(of_owner(tenant_id))]

    async def expiring(self, tenant_id: UUID, before: datetime, limit: int) -> Sequence[ApiKey]:
        """At most `limit` working keys that end before that time, the first to end first; not those that were replaced."""
        query = of_owner(tenant_id).order_by(None).order_by(ApiKey.expires_at, ApiKey.id).limit(limit)
        ending = (alive(datetime.now(UTC)), ApiKey.expires_at < before, ApiKey.replaced_by.is_(None))
        return (await self._session.scalars(query.where(*ending))).all()

    async def newest(
        self, tenant_id: UUID, state: KeyState | None, part: Slice[tuple[datetime, UUID]], search: str = ""
    ) -> Sequence[ApiKey]:
        """A part of the keys in this state (None: any), newest first, of which the name contains `search`, in any case, or the id
        begins with it.
        """
        named = ApiKey.name.icontains(search, autoescape=True)
        query = of_owner(tenant_id).order_by(None)
        query = query.where(named | ApiKey.key_id.startswith(search, autoescape=True))
        if state is not None:
            query = query.where(_in_state(state, datetime.now(UTC)))
        query = sliced(query, part, ApiKey.created_at, ApiKey.id, newest_first=True)
        return (await self._session.scalars(query)).all()

    async def replaced_by(self, tenant_id: UUID, ids: Iterable[UUID]) -> dict[UUID, ApiKey]:
        """The keys that these keys replaced, by the new one's id."""
        query = of_owner(tenant_id).where(ApiKey.replaced_by.in_([*ids]))
        return {old.replaced_by: old for old in await self._session.scalars(query) if old.replaced_by}

    async def change(
        self, tenant_id: UUID | None, key_id: str, change: KeyChange, expected: int | None = None
    ) -> ApiKey:
        """Change a key. `expected` is the revision that the caller has read; None for any.

        Raises `KeyNotFound`, `RevisionMoved`, `KeyEnded`, `InvalidField`.
        """
        record = await self.locked(tenant_id, key_id)
        if expected is not None and record.revision != expected:
            raise RevisionMoved(f"key {key_id} has changed since it was read: read it again")
        require_live(record)
        if "name" in change:
            record.name = check_key_name(change["name"])
        if "scopes" in change:
            record.scopes = check_scopes(change["scopes"], operator=tenant_id is None)
        if "allowed_cidrs" in change:
            record.allowed_cidrs = check_networks("allowed_cidrs", change["allowed_cidrs"])
        if "expires_at" in change and change["expires_at"] != record.expires_at:
            record.expires_at = check_new_expiry(record, change["expires_at"])
        await self._session.flush()
        # A flush forgets what is not of the row: the ids of the keys above.
        return await self._one(key_id, whole(tenant_id))

    async def revoke(self, tenant_id: UUID | None, key_id: str) -> ApiKey:
        """Ends a key at once; revoking it again changes nothing. Raises `KeyNotFound`."""
        record = await self.locked(tenant_id, key_id)
        record.revoked_at = record.revoked_at or datetime.now(UTC)
        await self._session.flush()
        return record

    async def rotate(
        self, tenant_id: UUID | None, key_id: str, grace_seconds: int = 0, *, created_by: str | None = None
    ) -> IssuedKey:
        """A new key with the same rights and limits; the old one goes on for `grace_seconds` (at most 30 days). The new one is its
        child: so both, and all below them, go on sharing what is left of their limits.

        Raises `InvalidField`, `KeyNotFound`, `KeyEnded` (rights that ended must not come back), `CountReached`.
        """
        if not 0 <= grace_seconds <= MAX_GRACE_SECONDS:
            raise InvalidField("grace_seconds", f"grace_seconds must be between 0 and {MAX_GRACE_SECONDS}")
        old = await self.locked(tenant_id, key_id)
        require_live(old)
        if old.replaced_by is not None:
            raise KeyEnded(f"key {key_id} was rotated already: rotate the key that replaced it")
        if grace_seconds:
            await self._check_room(tenant_id, replaced=True)
        issued = await self._issue(
            tenant_id,
            created_by,
            old,
            environment=old.environment,
            name=old.name,
            scopes=old.scopes,
            expires_at=old.expires_at,
            allowed_cidrs=old.allowed_cidrs,
        )
        await self.copy_limits(old, issued.record)
        old.successor = issued.record
        now = datetime.now(UTC)
        if grace_seconds == 0:
            old.revoked_at = now
        else:
            end = now + timedelta(seconds=grace_seconds)
            old.expires_at = min(end, old.expires_at or end)
        await self._session.flush()
        return issued

    async def locked(self, tenant_id: UUID | None, key_id: str) -> ApiKey:
        """The key, locked against other changes until the transaction ends. Raises `KeyNotFound`."""
        await self.lock(tenant_id)
        return await self._one(key_id, whole(tenant_id).with_for_update())

    async def _one(self, key_id: str, query: Select[ApiKey]) -> ApiKey:
        found = (
            await self._session.scalars(query.where(ApiKey.key_id == key_id)) if is_key_id(key_id) else None
        )
        record = None if found is None else found.one_or_none()
        if record is None:
            raise KeyNotFound(f"no key {key_id[:40]!r}")
        return record

    async def _issue(
        self,
        tenant_id: UUID | None,
        created_by: str | None,
        parent: ApiKey | None,
        *,
        environment: str,
        name: str,
        scopes: Iterable[str],
        expires_at: datetime | None,
        allowed_cidrs: Iterable[str],
    ) -> IssuedKey:
        operator = tenant_id is None
        key = generate_key(check_environment(environment, operator))
        record = ApiKey(
            tenant_id=tenant_id,
            key_id=key.key_id,
            environment=key.environment,
            name=check_key_name(name),
            secret_sha256=key.secret_sha256,
            scopes=check_scopes(scopes, operator=operator),
            allowed_cidrs=check_networks("allowed_cidrs", allowed_cidrs),
            expires_at=check_expiry(expires_at),
            created_by=created_by,
            successor=None,
            parent_id=None if tenant_id is None or parent is None else parent.id,
        )
        self._session.add(record)
        await self._session.flush()
        return IssuedKey(await self._one(record.key_id, whole(tenant_id)), key.plaintext)

    async def _check_room(self, tenant_id: UUID | None, *, replaced: bool) -> None:
        """Raises `CountReached` unless one more key fits: at most `max_keys` work, beside as many replaced ones in grace.

        A rotation adds a `replaced` one. An operator's keys have no limit.
        """
        await self.lock(tenant_id)
        own = (Quota.tenant_id == tenant_id, Quota.api_key_id.is_(None), Quota.adapter_id.is_(None))
        if tenant_id is None:
            return
        set_limit = await self._session.scalar(select(Quota.max_keys).where(*own))
        limit = default_limits(self._session).in_force("max_keys", set_limit)
        counts = select(func.count(), func.count().filter(ApiKey.replaced_by.is_(None)))
        found = await self._session.execute(
            counts.where(ApiKey.tenant_id == tenant_id, ApiKey.kind == "key", alive(datetime.now(UTC)))
        )
        every, current = found.one()
        if every >= 2 * limit or (not replaced and current >= limit):
            raise CountReached(
                "max_keys",
                f"this tenant may have {limit} keys (max_keys) and as many replaced ones in grace: revoke one first",
            )

    async def _check_depth(self, parent: ApiKey) -> None:
        """Raises `InvalidField` if a key below `parent` would be deeper than `MAX_DEPTH`."""
        if await self._session.scalar(DEPTH, {"id": parent.id}) >= MAX_DEPTH:
            raise InvalidField(
                "parent_id",
                f"at most {MAX_DEPTH} keys may mint one another in a row: key {parent.key_id} is the last",
            )

    async def limits(self, record: ApiKey) -> KeyLimits:
        """The limits of a key itself."""
        return await self._limits_of(record.id)

    async def bounds(self, record: ApiKey) -> KeyLimits:
        """What a key may grant at most: the tighter of its own limits and those of its group."""
        own = await self._limits_of(record.id)
        if record.limit_root in (None, record.id):
            return own
        shared = await self._limits_of(record.limit_root)
        both = {name: [each for each in (own[name], shared[name]) if each is not None] for name in own}
        return {name: min(limits, default=None) for name, limits in both.items()}

    async def _limits_of(self, key_id: UUID) -> KeyLimits:
        rows = await self._session.scalars(select(Quota).where(Quota.api_key_id == key_id))
        quota = rows.one_or_none()
        return {column: getattr(quota, column, None) for column in LIMIT_COLUMNS}

    async def copy_limits(self, old: ApiKey, new: ApiKey) -> None:
        """Give a new key the limits of another one, if that has any."""
        limits = await self.limits(old)
        if any(value is not None for value in limits.values()):
            self._session.add(Quota(tenant_id=new.tenant_id, api_key_id=new.id, **limits))
            await self._session.flush()


def of_owner(tenant_id: UUID | None) -> Select[ApiKey]:
    query = select(ApiKey).where(ApiKey.tenant_id == tenant_id, ApiKey.kind == "key")
    names = (ApiKey.parent_key_id, ApiKey.parent_id), (ApiKey.root_key_id, ApiKey.limit_root)
    named = [with_expression(name, _key_id_of(id)) for name, id in names]
    return query.options(selectinload(ApiKey.successor), *named).order_by(ApiKey.created_at, ApiKey.id)


def whole(tenant_id: UUID | None) -> Select[ApiKey]:
    """As `of_owner`, read again also where the session has the key."""
    return of_owner(tenant_id).execution_options(populate_existing=True)


def _key_id_of(id: ColumnElement[Any] | InstrumentedAttribute[Any]) -> ScalarSelect[Any]:
    key = aliased(ApiKey)
    return select(key.key_id).where(key.id == id).scalar_subquery()


def alive(now: datetime, key: type[ApiKey] = ApiKey) -> ColumnElement[bool]:
    """`is_live` in SQL."""
    return key.revoked_at.is_(None) & or_(key.expires_at.is_(None), key.expires_at > now)


def check_key(record: AuthenticatedKey | None, key: ParsedKey, now: datetime) -> AuthenticatedKey:
    """Check that `key` authenticates as `record` at `now`. Digests are compared also without a record."""
    matches = key.matches(NO_DIGEST if record is None else record.secret_sha256)
    if record is None or not matches or record.environment != key.environment:
        raise UnknownKey("no such API key")
    return check_usable(record, now)


def check_usable(record: AuthenticatedKey, now: datetime) -> AuthenticatedKey:
    """Raises `RevokedKey`, `ExpiredKey` or `TenantSuspended`."""
    if record.revoked_at is not None:
        raise RevokedKey(f"API key {record.key_id} is revoked")
    if not is_live(record, now):
        raise ExpiredKey(f"API key {record.key_id} has expired")
    if record.suspended_at is not None:
        raise TenantSuspended(f"tenant {record.tenant_name} is suspended")
    return record


def _in_state(state: KeyState, now: datetime) -> ColumnElement[bool]:
    match state:
        case "working":
            return alive(now)
        case "expired":
            return ApiKey.revoked_at.is_(None) & (ApiKey.expires_at <= now)
        case "revoked":
            return ApiKey.revoked_at.is_not(None)


def is_live(record: ApiKey | AuthenticatedKey, now: datetime) -> bool:
    return record.revoked_at is None and (record.expires_at is None or now < record.expires_at)


def require_live(record: ApiKey) -> None:
    """Raises `KeyEnded`."""
    if not is_live(record, datetime.now(UTC)):
        raise KeyEnded(f"key {record.key_id} is revoked or expired: create another one")


def check_environment(environment: str, operator: bool) -> str:
    if not operator and environment not in ("live", "test"):
        raise InvalidField("environment", f"environment {environment[:20]!r} is not allowed: live or test")
    return environment


def check_expiry(expires_at: datetime | None) -> datetime | None:
    if expires_at is not None and expires_at.tzinfo is None:
        raise InvalidField("expires_at", "expires_at needs a time zone")
    if expires_at is not None and expires_at <= datetime.now(UTC):
        raise InvalidField("expires_at", "expires_at must lie in the future")
    if expires_at is not None and expires_at > LAST_EXPIRY:
        raise InvalidField("expires_at", f"expires_at must lie before the year {LAST_EXPIRY.year}")
    return expires_at


def check_new_expiry(record: ApiKey, expires_at: datetime | None) -> datetime | None:
    """A replaced key's grace may be cut short but not prolonged."""
    end = check_expiry(expires_at)
    kept = record.expires_at
    if record.replaced_by is not None and kept is not None and (end is None or end > kept):
        raise InvalidField("expires_at", f"key {record.key_id} was replaced: it ends at {kept.isoformat()}")
    return end
