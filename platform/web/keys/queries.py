"""Keys as the console shows them: state, last use, requests of the last 24 hours, and what a rotation replaced."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.api_keys.keys import MAX_GRACE_SECONDS, KeyRepository, KeyState, is_live
from loraplex.tenants.ids import canonical_uuid
from loraplex.tenants.ledger.recent_requests import hourly_requests
from loraplex.tenants.ledger.usage_reports import UsageQuery, UsageSums, usage_rows
from loraplex.tenants.models import ApiKey
from loraplex.tenants.rfc3339 import utc_text, zoned_time
from loraplex.tenants.scopes import TENANT_SCOPES

__all__ = [
    "ALL_SCOPES",
    "MAX_GRACE_SECONDS",
    "STATES",
    "DayOfUse",
    "Key",
    "KeyPage",
    "KeyState",
    "days_of_use",
    "hours_until",
    "key",
    "key_page",
]
ALL_SCOPES: Final = tuple(sorted(TENANT_SCOPES))
STATES: Final[tuple[KeyState, ...]] = ("working", "expired", "revoked")
HOURS: Final = 24
DAYS: Final = 30
PAGE: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key without its secret. `requests` of each of the last 24 hours, the running one last, refused ones included.

    `replaces`: the public id of the key that it replaced, which works until `replaced_until`; both None without a rotation.
    """

    id: str
    name: str
    environment: str
    scopes: tuple[str, ...]
    networks: tuple[str, ...]
    created_by: str | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None
    revision: int
    state: Literal["working", "replaced", "expired", "revoked"]
    replaced_by: str | None
    replaces: str | None
    replaced_until: datetime | None
    requests: tuple[int, ...]

    @property
    def requests_24h(self) -> int:
        return sum(self.requests)


@dataclass(frozen=True, slots=True)
class KeyPage:
    """`older`: the cursor of the next page, None on the last one."""

    keys: Sequence[Key]
    older: str | None


@dataclass(frozen=True, slots=True)
class DayOfUse:
    """What one day's requests used, those that were refused left out. `start` is 00:00 UTC."""

    start: datetime
    sums: UsageSums


async def key_page(
    session: AsyncSession, tenant_id: UUID, state: KeyState | None = None, before: str = ""
) -> KeyPage:
    """Return at most 50 keys of a state (None: any), newest first, behind a cursor; an unreadable one is the first page."""
    repository = KeyRepository(session)
    records = await repository.newest(tenant_id, state, _place(before), PAGE + 1)
    shown = records[:PAGE]
    keys = await _keys(session, tenant_id, shown)
    last = shown[-1] if len(records) > PAGE else None
    return KeyPage(keys, None if last is None else f"{utc_text(last.created_at)} {last.id}")


async def key(session: AsyncSession, tenant_id: UUID, key_id: str) -> Key:
    """Return one key. Raises `KeyNotFound`."""
    record = await KeyRepository(session).get(tenant_id, key_id)
    return (await _keys(session, tenant_id, [record]))[0]


async def days_of_use(
    session: AsyncSession, tenant_id: UUID, key_id: str, currency: str, now: datetime
) -> list[DayOfUse]:
    """Return what a key used on each of the last 30 days (UTC), the running one last."""
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)
    days = [today - timedelta(days=back) for back in range(DAYS - 1, -1, -1)]
    query = UsageQuery(
        tenant_id=tenant_id,
        currency=currency,
        key_id=key_id,
        start=days[0],
        end=today + timedelta(days=1),
        bucket="1d",
        group_by=frozenset(),
    )
    found = {row.key.start: row.sums for row in await usage_rows(session, query, None, DAYS)}
    return [DayOfUse(day, found.get(day, UsageSums())) for day in days]


async def _keys(session: AsyncSession, tenant_id: UUID, records: Sequence[ApiKey]) -> list[Key]:
    ids, now = [record.id for record in records], datetime.now(UTC)
    hours = hours_until(now)
    counts = await hourly_requests(session, tenant_id, "key", ids, hours[0])
    replaced = await KeyRepository(session).replaced_by(tenant_id, ids)
    return [
        _key(record, replaced.get(record.id), tuple(counts[record.id].get(hour, 0) for hour in hours), now)
        for record in records
    ]


def _key(record: ApiKey, old: ApiKey | None, requests: tuple[int, ...], now: datetime) -> Key:
    return Key(
        id=record.key_id,
        name=record.name,
        environment=record.environment,
        scopes=tuple(record.scopes),
        networks=tuple(record.allowed_cidrs),
        created_by=record.created_by,
        created_at=record.created_at,
        expires_at=record.expires_at,
        revoked_at=record.revoked_at,
        last_used_at=record.last_used_at,
        revision=record.revision,
        state=_state(record, now),
        replaced_by=None if record.successor is None else record.successor.key_id,
        replaces=None if old is None else old.key_id,
        replaced_until=old.expires_at if old is not None and is_live(old, now) else None,
        requests=requests,
    )


def _state(record: ApiKey, now: datetime) -> Literal["working", "replaced", "expired", "revoked"]:
    if record.revoked_at is not None:
        return "revoked"
    if not is_live(record, now):
        return "expired"
    return "working" if record.replaced_by is None else "replaced"


def _place(cursor: str) -> tuple[datetime, UUID] | None:
    time, _, identity = cursor.partition(" ")
    parsed, record_id = zoned_time(time), canonical_uuid(identity)
    return None if parsed is None or record_id is None else (parsed, record_id)


def hours_until(now: datetime) -> list[datetime]:
    """Return the last 24 hours (UTC) by their begin, the running one last."""
    last = now.replace(minute=0, second=0, microsecond=0)
    return [last - timedelta(hours=back) for back in range(HOURS - 1, -1, -1)]
