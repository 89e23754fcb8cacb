"""Issuing, finding and checking API keys. Invariant: the plaintext leaves this module once, in `IssuedKey`."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from uuid import UUID

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import (
    ExpiredKey,
    InvalidField,
    KeyNotFound,
    RevokedKey,
    TenantSuspended,
    UnknownKey,
)
from loraplex.tenants.key_format import ParsedKey, generate_key, is_key_id, parse_key
from loraplex.tenants.models import ApiKey
from loraplex.tenants.names import check_key_name
from loraplex.tenants.scopes import check_scopes

MAX_GRACE_SECONDS = 30 * 24 * 3600
NO_DIGEST = bytes(32)
FIND_KEY = text("SELECT * FROM find_api_key(:key_id)")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundKey:
    """A key with what its tenant decides, as the database's one lookup function returns it.

    An operator's key has no tenant: its tenant's fields are None. `policy_epoch` says how new all this is.
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
    """A new key; `plaintext` is shown once and stored nowhere."""

    record: ApiKey
    plaintext: str = field(repr=False)


class KeyRepository:
    """The keys seen by one session."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def create(
        self,
        tenant_id: UUID | None,
        name: str,
        scopes: Iterable[str],
        environment: str = "live",
        expires_at: datetime | None = None,
    ) -> IssuedKey:
        """`tenant_id` None makes an operator's key, whose environment is `op`. Raises `InvalidField`."""
        operator = tenant_id is None
        key = generate_key(check_environment("op" if operator else environment, operator))
        record = ApiKey(
            tenant_id=tenant_id,
            key_id=key.key_id,
            environment=key.environment,
            name=check_key_name(name),
            secret_sha256=key.secret_sha256,
            scopes=check_scopes(scopes, operator=operator),
            expires_at=check_expiry(expires_at),
        )
        self._session.add(record)
        await self._session.flush()
        await self._session.refresh(record, ["created_at"])
        return IssuedKey(record, key.plaintext)

    async def find(self, key_id: str) -> FoundKey | None:
        """The key with that public id and its tenant; also when it is revoked or expired. For writers and operators."""
        if not is_key_id(key_id):
            return None
        row = (await self._session.execute(FIND_KEY, {"key_id": key_id})).one_or_none()
        return None if row is None else FoundKey(**row._mapping)

    async def authenticate(self, presented: str) -> FoundKey:
        """The live key of a presented text and its tenant. Raises `InvalidApiKey` or `TenantSuspended`."""
        key = parse_key(presented)
        return check_key(await self.find(key.key_id), key, datetime.now(UTC))

    async def list(self, tenant_id: UUID | None) -> list[ApiKey]:
        """A tenant's keys, or the operators' for None; oldest first."""
        query = select(ApiKey).where(ApiKey.tenant_id == tenant_id).order_by(ApiKey.created_at, ApiKey.id)
        return [*await self._session.scalars(query)]

    async def revoke(self, tenant_id: UUID | None, key_id: str) -> ApiKey:
        """Ends a key at once; revoking it again changes nothing. Raises `KeyNotFound`."""
        record = await self._owned(tenant_id, key_id)
        record.revoked_at = record.revoked_at or datetime.now(UTC)
        return record

    async def rotate(self, tenant_id: UUID | None, key_id: str, grace_seconds: int = 0) -> IssuedKey:
        """A new key with the same rights; the old one goes on for `grace_seconds` (at most 30 days).

        Raises `KeyNotFound`, also for a key that no longer works: its rights must not come back.
        """
        if not 0 <= grace_seconds <= MAX_GRACE_SECONDS:
            raise InvalidField("grace_seconds", f"grace_seconds must be between 0 and {MAX_GRACE_SECONDS}")
        old = await self._owned(tenant_id, key_id)
        now = datetime.now(UTC)
        if not is_live(old, now):
            raise KeyNotFound(f"key {key_id} is revoked or expired and cannot be rotated")
        issued = await self.create(tenant_id, old.name, old.scopes, old.environment, old.expires_at)
        old.replaced_by = issued.record.id
        if grace_seconds == 0:
            old.revoked_at = now
        else:
            end = now + timedelta(seconds=grace_seconds)
            old.expires_at = min(end, old.expires_at or end)
        return issued

    async def _owned(self, tenant_id: UUID | None, key_id: str) -> ApiKey:
        query = select(ApiKey).where(ApiKey.tenant_id == tenant_id, ApiKey.key_id == key_id).with_for_update()
        record = (await self._session.scalars(query)).one_or_none() if is_key_id(key_id) else None
        if record is None:
            raise KeyNotFound(f"no key {key_id[:40]!r}")
        return record


def check_key(record: FoundKey | None, key: ParsedKey, now: datetime) -> FoundKey:
    """Whether `key` authenticates as `record` at `now`; the digests are compared also when there is no record."""
    matches = key.matches(NO_DIGEST if record is None else record.secret_sha256)
    if record is None or not matches or record.environment != key.environment:
        raise UnknownKey("no such API key")
    if record.revoked_at is not None:
        raise RevokedKey(f"API key {record.key_id} is revoked")
    if not is_live(record, now):
        raise ExpiredKey(f"API key {record.key_id} has expired")
    if record.suspended_at is not None:
        raise TenantSuspended(f"tenant {record.tenant_name} is suspended")
    return record


def is_live(record: ApiKey | FoundKey, now: datetime) -> bool:
    return record.revoked_at is None and (record.expires_at is None or now < record.expires_at)


def check_environment(environment: str, operator: bool) -> str:
    if not operator and environment not in ("live", "test"):
        raise InvalidField("environment", f"environment {environment[:20]!r} is not allowed: live or test")
    return environment


def check_expiry(expires_at: datetime | None) -> datetime | None:
    if expires_at is not None and expires_at.tzinfo is None:
        raise InvalidField("expires_at", "expires_at needs a time zone")
    if expires_at is not None and expires_at <= datetime.now(UTC):
        raise InvalidField("expires_at", "expires_at must lie in the future")
    return expires_at
