"""Keys: issued once, found with their tenant, changed within bounds, refused for the right reason."""

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession
from tests.tenants.registry_records import make_tenant
from tests.tenants.suspension import suspend

from loraplex.tenants.api_keys import queries
from loraplex.tenants.api_keys.key_format import ParsedKey, generate_key, parse_key
from loraplex.tenants.api_keys.keys import IssuedKey, KeyRepository
from loraplex.tenants.api_keys.records import KeyChange
from loraplex.tenants.database import Database
from loraplex.tenants.default_limits import DefaultLimits
from loraplex.tenants.errors import (
    CountReached,
    ExpiredKey,
    InvalidApiKey,
    InvalidField,
    InvalidName,
    InvalidScope,
    KeyEnded,
    KeyNotFound,
    RevisionMoved,
    RevokedKey,
    TenantSuspended,
    UnknownKey,
)
from loraplex.tenants.models import Quota
from loraplex.tenants.pages import Part
from loraplex.tenants.people.console_keys import MAX_LIVE, issue_console_key


async def issue(database: Database, tenant_id: UUID | None, *scopes: str) -> IssuedKey:
    async with database.as_operator() as session:
        return await KeyRepository(session).create(tenant_id, "first", scopes)


async def authenticate(database: Database, plaintext: str) -> str:
    async with database.as_operator() as session:
        return (await KeyRepository(session).authenticate(plaintext)).key_id


async def test_created_key_authenticates_with_its_tenant(database: Database) -> None:
    tenant_id = await make_tenant(database)
    issued = await issue(database, tenant_id, "inference", "adapters:read")
    async with database.as_operator() as session:
        record = await KeyRepository(session).authenticate(issued.plaintext)
    assert record.tenant_name == "acme"
    assert record.scopes == ["adapters:read", "inference"]
    assert (record.environment, issued.record.name) == ("live", "first")


async def test_the_secret_is_stored_nowhere(database: Database) -> None:
    tenant_id = await make_tenant(database)
    issued = await issue(database, tenant_id, "inference")
    async with database.as_operator() as session:
        await session.execute(text("RESET ROLE"))
        row = await session.scalar(text("SELECT row_to_json(api_keys)::text FROM api_keys"))
    assert row is not None and parse_key(issued.plaintext).secret not in row
    assert parse_key(issued.plaintext).secret not in repr(issued)


async def test_operator_keys_have_no_tenant(database: Database) -> None:
    issued = await issue(database, None, "operator")
    assert issued.plaintext.startswith("lpx_op_")
    assert await authenticate(database, issued.plaintext) == issued.record.key_id


async def test_wrong_secret_environment_or_id_is_unknown(database: Database) -> None:
    tenant_id = await make_tenant(database)
    key = parse_key((await issue(database, tenant_id, "inference")).plaintext)
    other = generate_key("live")
    for wrong in (
        ParsedKey("live", key.key_id, other.secret),
        ParsedKey("test", key.key_id, key.secret),
        ParsedKey("op", key.key_id, key.secret),
        other,
    ):
        with pytest.raises(UnknownKey):
            await authenticate(database, wrong.plaintext)


async def test_revoked_key(database: Database) -> None:
    tenant_id = await make_tenant(database)
    issued = await issue(database, tenant_id, "inference")
    for _ in range(2):
        async with database.as_operator() as session:
            await KeyRepository(session).revoke(tenant_id, issued.record.key_id)
    with pytest.raises(RevokedKey):
        await authenticate(database, issued.plaintext)


async def test_expired_key(database: Database) -> None:
    tenant_id = await make_tenant(database)
    issued = await issue(database, tenant_id, "inference")
    async with database.as_operator() as session:
        await session.execute(text("UPDATE api_keys SET expires_at = now() - interval '1 second'"))
    with pytest.raises(ExpiredKey):
        await authenticate(database, issued.plaintext)
    async with database.as_operator() as session:
        with pytest.raises(KeyEnded):
            await KeyRepository(session).rotate(tenant_id, issued.record.key_id)
        with pytest.raises(KeyNotFound):
            await KeyRepository(session).rotate(tenant_id, "a\x00")


async def test_suspended_tenant(database: Database) -> None:
    tenant_id = await make_tenant(database)
    issued = await issue(database, tenant_id, "inference")
    async with database.as_operator() as session:
        await suspend(session, "acme")
    with pytest.raises(TenantSuspended):
        await authenticate(database, issued.plaintext)
    with pytest.raises(UnknownKey):
        await authenticate(
            database, ParsedKey("live", issued.record.key_id, generate_key("live").secret).plaintext
        )


async def test_rotation_without_grace_ends_the_old_key(database: Database) -> None:
    tenant_id = await make_tenant(database)
    old = await issue(database, tenant_id, "usage:read")
    async with database.as_operator() as session:
        new = await KeyRepository(session).rotate(tenant_id, old.record.key_id)
    assert await authenticate(database, new.plaintext) == new.record.key_id
    assert new.record.scopes == ["usage:read"]
    with pytest.raises(RevokedKey):
        await authenticate(database, old.plaintext)


async def test_rotation_with_grace_never_prolongs_the_old_key(database: Database) -> None:
    tenant_id = await make_tenant(database)
    soon = datetime.now(UTC) + timedelta(seconds=100)
    async with database.as_operator() as session:
        keys = KeyRepository(session)
        short = await keys.create(tenant_id, "short", ["inference"], expires_at=soon)
        endless = await keys.create(tenant_id, "endless", ["inference"])
        for key in (short, endless):
            await keys.rotate(tenant_id, key.record.key_id, grace_seconds=3600)
        assert short.record.expires_at == soon
        assert endless.record.expires_at is not None and endless.record.expires_at > soon
        assert endless.record.replaced_by is not None
    assert await authenticate(database, endless.plaintext)


async def test_another_tenants_keys_do_not_exist(database: Database) -> None:
    mine, other = await make_tenant(database), await make_tenant(database, "other")
    issued = await issue(database, mine, "inference")
    operator = await issue(database, None, "operator")
    async with database.as_operator() as session:
        keys = KeyRepository(session)
        for key_id in (issued.record.key_id, operator.record.key_id):
            with pytest.raises(KeyNotFound):
                await keys.revoke(other, key_id)
            with pytest.raises(KeyNotFound):
                await keys.rotate(other, key_id)
        assert await keys.list(other) == []
        assert [key.key_id for key in await keys.list(mine)] == [issued.record.key_id]
        assert [key.key_id for key in await keys.list(None)] == [operator.record.key_id]


async def test_refused_fields(database: Database) -> None:
    tenant_id = await make_tenant(database)
    past = datetime.now(UTC) - timedelta(seconds=1)
    async with database.as_operator() as session:
        keys = KeyRepository(session)
        with pytest.raises(InvalidScope):
            await keys.create(tenant_id, "name", ["operator"])
        with pytest.raises(InvalidName):
            await keys.create(tenant_id, "a\nb", ["inference"])
        with pytest.raises(InvalidField, match="live or test"):
            await keys.create(tenant_id, "name", ["inference"], environment="op")
        with pytest.raises(InvalidField, match="future"):
            await keys.create(tenant_id, "name", ["inference"], expires_at=past)
        with pytest.raises(InvalidField, match="time zone"):
            await keys.create(tenant_id, "name", ["inference"], expires_at=past.replace(tzinfo=None))
        with pytest.raises(InvalidField, match="year 3000"):
            await keys.create(tenant_id, "name", ["inference"], expires_at=datetime(9999, 1, 1, tzinfo=UTC))
        with pytest.raises(InvalidField, match="allowed_cidrs"):
            await keys.create(tenant_id, "name", ["inference"], allowed_cidrs=["10.0.0.1/8"])
        with pytest.raises(InvalidField, match="grace_seconds"):
            await keys.rotate(tenant_id, "x", grace_seconds=-1)


async def test_a_typo_needs_no_database() -> None:
    async with AsyncSession() as session:
        with pytest.raises(InvalidApiKey):
            await KeyRepository(session).authenticate("lpx_live_typo")


async def test_a_change_names_what_it_has_seen_and_touches_nothing_else(database: Database) -> None:
    tenant_id = await make_tenant(database)
    old = (await issue(database, tenant_id, "inference")).record
    later = datetime.now(UTC) + timedelta(days=1)
    async with database.as_tenant(tenant_id) as session:
        keys = KeyRepository(session)
        key = await keys.change(tenant_id, old.key_id, {"name": "second"}, expected=old.revision)
        assert (key.name, key.scopes, key.revision) == ("second", ["inference"], old.revision + 1)
        with pytest.raises(RevisionMoved):
            await keys.change(tenant_id, old.key_id, {"name": "third"}, expected=old.revision)
        key = await keys.change(tenant_id, old.key_id, {})
        assert key.revision == old.revision + 1
        whole = {"scopes": ["usage:read"], "allowed_cidrs": ["::ffff:10.1.0.0/112"], "expires_at": later}
        key = await keys.change(tenant_id, old.key_id, KeyChange(**whole))  # type: ignore[typeddict-item]
        assert (key.name, key.scopes, key.allowed_cidrs) == ("second", ["usage:read"], ["10.1.0.0/16"])
        assert key.expires_at == later
        for wrong in ({"name": ""}, {"scopes": ["operator"]}, {"allowed_cidrs": ["x"]}):
            with pytest.raises(InvalidField):
                await keys.change(tenant_id, old.key_id, KeyChange(**wrong))  # type: ignore[typeddict-item]


async def test_what_ended_does_not_come_back(database: Database) -> None:
    tenant_id = await make_tenant(database)
    async with database.as_tenant(tenant_id) as session:
        keys = KeyRepository(session)
        old = (await keys.create(tenant_id, "old", ["inference"], allowed_cidrs=["10.0.0.0/8"])).record
        new = (await keys.rotate(tenant_id, old.key_id, grace_seconds=60, created_by="x")).record
        assert (new.allowed_cidrs, new.created_by) == (["10.0.0.0/8"], "x")
        assert (await keys.get(tenant_id, old.key_id)).successor is new
        with pytest.raises(InvalidField, match="was replaced"):
            await keys.change(tenant_id, old.key_id, {"expires_at": None})
        with pytest.raises(KeyEnded, match="rotated already"):
            await keys.rotate(tenant_id, old.key_id)
        sooner = datetime.now(UTC) + timedelta(seconds=5)
        assert (await keys.change(tenant_id, old.key_id, {"expires_at": sooner})).expires_at == sooner
        await keys.revoke(tenant_id, new.key_id)
        with pytest.raises(KeyEnded):
            await keys.change(tenant_id, new.key_id, {"name": "again"})


async def test_rotation_takes_the_keys_limits_along(database: Database) -> None:
    tenant_id = await make_tenant(database)
    old = (await issue(database, tenant_id, "inference")).record
    async with database.as_tenant(tenant_id) as session:
        session.add(Quota(tenant_id=tenant_id, api_key_id=old.id, tokens_per_day=7))
        await session.flush()
        new = (await KeyRepository(session).rotate(tenant_id, old.key_id)).record
        limits = await session.scalar(select(Quota.tokens_per_day).where(Quota.api_key_id == new.id))
    assert limits == 7


async def test_pages_show_every_key_once(database: Database) -> None:
    tenant_id = await make_tenant(database)
    created = [(await issue(database, tenant_id, "inference")).record.key_id for _ in range(5)]
    async with database.as_tenant(tenant_id) as session:
        # Those of one transaction have one time: the id decides among them.
        for _ in range(2):
            created.append(
                (await KeyRepository(session).create(tenant_id, "late", ["inference"])).record.key_id
            )
    seen: list[str] = []
    after: tuple[datetime, UUID] | None = None
    async with database.as_tenant(tenant_id) as session:
        while rows := await queries.keys(session, tenant_id, Part(2, after)):
            seen += [row.id for row in rows]
            after = (rows[-1].created_at, rows[-1].row_id)
    assert seen[:5] == created[:5] and sorted(seen) == sorted(created)


@pytest.mark.parametrize("with_row", [False, True])
async def test_keys_have_a_bound_where_no_operator_set_one(database: Database, with_row: bool) -> None:
    tenant_id, limited = await make_tenant(database), Database(database.url, limits=DefaultLimits(max_keys=2))
    if with_row:
        async with database.as_operator() as session:
            session.add(Quota(tenant_id=tenant_id, requests_per_minute=5))
    for _ in range(2):
        await issue(limited, tenant_id, "inference")
    with pytest.raises(CountReached, match="may have 2 keys"):
        await issue(limited, tenant_id, "inference")
    await limited.close()


async def test_a_tenant_never_has_more_keys_than_its_quota(database: Database) -> None:
    tenant_id = await make_tenant(database)
    first = (await issue(database, tenant_id, "inference")).record
    async with database.as_operator() as session:
        session.add(Quota(tenant_id=tenant_id, max_keys=3))
    results = await asyncio.gather(
        *(issue(database, tenant_id, "inference") for _ in range(6)), return_exceptions=True
    )
    refused = [result for result in results if isinstance(result, CountReached)]
    assert len(refused) == 4 and refused[0].limit == "max_keys"
    async with database.as_tenant(tenant_id) as session:
        keys = KeyRepository(session)
        # At the limit keys can still be rotated; those in grace are as many at most.
        successor = first.key_id
        for _ in range(3):
            successor = (await keys.rotate(tenant_id, successor, grace_seconds=60)).record.key_id
        with pytest.raises(CountReached):
            await keys.rotate(tenant_id, successor, grace_seconds=60)
        successor = (await keys.rotate(tenant_id, successor)).record.key_id
        with pytest.raises(CountReached):
            await keys.create(tenant_id, "a fourth", ["inference"])
        await keys.revoke(tenant_id, successor)
        await keys.create(tenant_id, "room again", ["inference"])


async def test_a_key_of_the_console_does_not_wait_for_a_change_of_keys(database: Database) -> None:
    """It ends an older one, which locks the tenant: whoever changes keys locks them first, and then the tenant."""
    tenant_id, ends = await make_tenant(database), datetime.now(UTC) + timedelta(minutes=10)
    async with database.as_operator() as changing, database.as_tenant(tenant_id) as session:
        await KeyRepository(changing).lock(tenant_id)
        await session.execute(text("SET LOCAL lock_timeout = '200ms'"))
        for _ in range(MAX_LIVE + 1):
            await issue_console_key(session, tenant_id, "playground", ["inference"], "ada@example.com", ends)
