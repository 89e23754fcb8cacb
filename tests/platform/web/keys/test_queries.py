"""Keys as the console lists them: states, rotation, requests of 24 hours, pages, and nothing of another tenant."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from tests.tenants.ledger.stored_usage import Used, settle
from tests.tenants.ledger.stored_usage import make_tenant as make_using_tenant
from tests.tenants.registry_records import make_tenant

from loraplex.platform.web.cursors import Cursors, Page
from loraplex.platform.web.keys import queries as keys
from loraplex.platform.web.keys.queries import KEY_ORDER
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.api_keys.records import KeyDocument
from loraplex.tenants.database import Database
from loraplex.tenants.errors import KeyNotFound


def part(
    size: int = 50, after: tuple[datetime, UUID] | None = None
) -> Page[KeyDocument, tuple[datetime, UUID]]:
    return Page(size, after, {}, Cursors(b"key", b"scope"), KEY_ORDER)


async def create(database: Database, tenant_id: UUID, *names: str) -> list[str]:
    """Public ids. Each key has a time of creation of its own."""
    made = []
    for name in names:
        async with database.as_operator() as session:
            made.append((await KeyRepository(session).create(tenant_id, name, ["inference"])).record.key_id)
    return made


async def test_keys_are_listed_newest_first_with_their_states(database: Database) -> None:
    tenant_id, other = await make_tenant(database), await make_tenant(database, "other")
    await create(database, other, "foreign")
    first, rotated, ended = await create(database, tenant_id, "first", "rotated", "ended")
    async with database.as_operator() as session:
        issued = await KeyRepository(session).rotate(tenant_id, rotated, 3600)
        await KeyRepository(session).revoke(tenant_id, ended)
    async with database.as_tenant(tenant_id) as session:
        listed = await keys.keys(session, tenant_id, None, part())
        assert [(key.id, key.state) for key in listed] == [
            (issued.record.key_id, "working"),
            (ended, "revoked"),
            (rotated, "replaced"),
            (first, "working"),
        ]
        assert (listed[0].replaces, listed[2].replaced_by) == (rotated, issued.record.key_id)
        assert listed[0].replaced_until == listed[2].expires_at is not None
        working = await keys.keys(session, tenant_id, "working", part())
        assert {key.id for key in working} == {issued.record.key_id, rotated, first}
        assert [key.id for key in await keys.keys(session, tenant_id, "revoked", part())] == [ended]
        assert await keys.keys(session, tenant_id, "expired", part()) == []
    async with database.as_tenant(other) as session:
        with pytest.raises(KeyNotFound):
            await keys.key(session, other, first)


async def test_pages_follow_each_other(database: Database) -> None:
    tenant_id = await make_tenant(database)
    made = await create(database, tenant_id, *"abc")
    async with database.as_tenant(tenant_id) as session:
        # Those of one transaction have one time: the id decides among them.
        for name in "de":
            made.append((await KeyRepository(session).create(tenant_id, name, ["inference"])).record.key_id)
    seen: list[str] = []
    after: tuple[datetime, UUID] | None = None
    async with database.as_tenant(tenant_id) as session:
        while True:
            page = part(2, after)
            found = await keys.keys(session, tenant_id, None, page)
            seen += [key.id for key in page.cut(found)]
            cursor = page.next(found)
            if cursor is None:
                break
            after = KEY_ORDER.read(page.cursors.decode(cursor)[1])
    assert seen[2:] == made[2::-1] and sorted(seen) == sorted(made)


async def test_requests_are_those_of_the_last_24_hours(database: Database) -> None:
    tenant = make_using_tenant(database.url)
    (first, first_id), (second, _) = tenant.keys.items()
    now = datetime.now(UTC)
    times = [now, now, now - timedelta(hours=3), now - timedelta(hours=30)]
    settle(database.url, tenant, [Used(None, first_id, at, currency="USD") for at in times])
    async with database.as_tenant(tenant.id) as session:
        found = await keys.key(session, tenant.id, first)
        assert len(found.requests) == 24 and found.requests_24h == 3
        assert found.requests[-1] == 2 and found.requests[-4] == 1
        assert (await keys.key(session, tenant.id, second)).requests_24h == 0
        days = await keys.days_of_use(session, tenant.id, first, "USD", now)
    assert len(days) == 30 and [*days] == sorted(days)
    assert [*days][-1] == now.replace(hour=0, minute=0, second=0, microsecond=0)
    assert sum(each.requests for each in days.values()) == len(times)
