"""Keys as the console shows them: state, last use, requests of the last 24 hours, and what a rotation replaced."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, TypeAlias
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.web.sorting import SortOrder, by_time
from loraplex.tenants.api_keys.keys import KeyRepository, is_live
from loraplex.tenants.api_keys.queries import Position
from loraplex.tenants.api_keys.records import KeyDocument, KeyState
from loraplex.tenants.ledger.recent_requests import hourly_requests
from loraplex.tenants.ledger.usage_reports import UsageSums, daily_sums
from loraplex.tenants.models import ApiKey
from loraplex.tenants.pages import Slice

HOURS: Final = 24
DAYS: Final = 30
KEY_ORDER: Final[SortOrder[KeyDocument, Position]] = by_time(lambda key: (key.created_at, key.row_id))
ShownState: TypeAlias = Literal["working", "replaced", "expired", "revoked"]


class ShownKey(KeyDocument):
    """A key with its use. `requests` of each of the last 24 hours, the running one last, refused ones included.

    `replaces`: the public id of the key that it replaced, which works until `replaced_until`; both None without a rotation.
    """

    state: ShownState
    replaces: str | None
    replaced_until: datetime | None
    requests: tuple[int, ...]

    @property
    def requests_24h(self) -> int:
        return sum(self.requests)


async def keys(
    session: AsyncSession, tenant_id: UUID, state: KeyState | None, part: Slice[Position], search: str = ""
) -> list[ShownKey]:
    """Return keys in a state (None: any), the newest first, that `search` finds by name or id."""
    found = await KeyRepository(session).newest(tenant_id, state, part, search)
    return await _shown(session, tenant_id, found)


async def key(session: AsyncSession, tenant_id: UUID, key_id: str) -> ShownKey:
    """Return one key. Raises `KeyNotFound`."""
    (found,) = await _shown(session, tenant_id, [await KeyRepository(session).get(tenant_id, key_id)])
    return found


async def days_of_use(
    session: AsyncSession, tenant_id: UUID, key_id: str, currency: str, now: datetime
) -> dict[datetime, UsageSums]:
    """Return what a key used on each of the last 30 days (UTC) by their begin, the running one last. Refused requests use nothing."""
    first = now.date() - timedelta(days=DAYS - 1)
    return await daily_sums(session, tenant_id, currency, first, now.date(), key_id)


def hours_until(now: datetime) -> list[datetime]:
    """Return the last 24 hours (UTC) by their begin, the running one last."""
    last = now.replace(minute=0, second=0, microsecond=0)
    return [last - timedelta(hours=back) for back in range(HOURS - 1, -1, -1)]


async def _shown(session: AsyncSession, tenant_id: UUID, rows: Sequence[ApiKey]) -> list[ShownKey]:
    ids, now = [row.id for row in rows], datetime.now(UTC)
    hours = hours_until(now)
    counts = await hourly_requests(session, tenant_id, "key", ids, hours[0])
    replaced = await KeyRepository(session).replaced_by(tenant_id, ids)
    shown = []
    for row in rows:
        old = replaced.get(row.id)
        key = ShownKey.of(
            row,
            state=_state(row, now),
            replaces=None if old is None else old.key_id,
            replaced_until=old.expires_at if old is not None and is_live(old, now) else None,
            requests=tuple(counts[row.id].get(hour, 0) for hour in hours),
        )
        shown.append(key)
    return shown


def _state(row: ApiKey, now: datetime) -> ShownState:
    if row.revoked_at is not None:
        return "revoked"
    if not is_live(row, now):
        return "expired"
    return "working" if row.replaced_by is None else "replaced"
