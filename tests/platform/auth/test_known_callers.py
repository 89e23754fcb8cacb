"""A key that was read recently goes on working while PostgreSQL is away, as it was read and under no older policy."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from uuid import UUID

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from tests.platform.auth.authentication import Clock, Uses, bearer, make_key, revoke
from tests.tenants.suspension import suspend

from loraplex.platform.auth import authenticator as authenticator_module
from loraplex.platform.auth import key_cache
from loraplex.platform.auth.authenticator import Authenticator, Caller
from loraplex.platform.errors import AddressNotAllowed, describe
from loraplex.tenants import database as database_module
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.key_format import ParsedKey, generate_key
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.circuit_breaker import FAILURES
from loraplex.tenants.database import Database
from loraplex.tenants.errors import (
    DatabaseUnavailable,
    ExpiredKey,
    PolicyStale,
    RevokedKey,
    StoreUnavailable,
    TenantSuspended,
    UnknownKey,
    ValkeyUnavailable,
)

KNOWN_S = 300.0
HOME = "192.0.2.1"


class LosableDatabase(Database):
    """`lost`: connections are refused. `silent`: what is asked gets no answer. `asked` counts transactions."""

    lost = silent = False
    asked = 0

    @asynccontextmanager
    async def as_writer(self) -> AsyncIterator[AsyncSession]:
        self.asked += 1
        if self.lost:
            raise DatabaseUnavailable("refused")
        if self.silent:
            await asyncio.Event().wait()
        async with super().as_writer() as session:
            yield session


class Published:
    """The newest policy epoch in Valkey, which may be away too."""

    epoch = 1
    away = False

    async def require(self, tenant_id: UUID, policy_epoch: int) -> None:
        if self.away:
            raise ValkeyUnavailable("away")
        if policy_epoch < self.epoch:
            raise PolicyStale("older")


class World:
    """One gateway's authentication over a database that can be lost."""

    def __init__(self, database: Database) -> None:
        self.database = LosableDatabase(database.url)
        self.clock, self.published, self.uses = Clock(), Published(), Uses()
        self.authenticator = Authenticator(
            self.database,
            1.0,
            known_s=KNOWN_S,
            require_policy=self.published.require,
            key_use=self.uses,
            clock=self.clock,
        )

    async def enter(self, key: str, *, cached: bool = True, known: bool = True) -> Caller:
        return await self.authenticator.authenticate(bearer(key), HOME, cached=cached, known=known)

    async def is_unavailable(self, key: str, *, cached: bool = True, known: bool = True) -> None:
        with pytest.raises(StoreUnavailable) as refused:
            await self.enter(key, cached=cached, known=known)
        assert describe(refused.value).row.status == 503


@pytest.fixture
async def world(database: Database) -> AsyncIterator[World]:
    world = World(database)
    yield world
    await world.database.close()


@pytest.mark.parametrize("cached", [False, True])
async def test_a_key_is_known_for_a_while_after_it_was_read(
    world: World, database: Database, cached: bool
) -> None:
    key, unread = await make_key(database), await make_key(database, tenant="rival")
    first = await world.enter(key, cached=cached)
    world.database.lost = True
    world.clock.now = KNOWN_S - 0.1
    for _ in range(2 * FAILURES):
        assert await world.enter(key, cached=cached) == first
        await world.is_unavailable(unread, cached=cached)
        await world.is_unavailable(generate_key("live").plaintext, cached=cached)
        await world.is_unavailable(key, cached=False, known=False)
    assert len(world.uses.noted) == 1 + 2 * FAILURES
    forged = ParsedKey("live", first.key_id, "0" * 43).plaintext
    with pytest.raises(UnknownKey):
        await world.enter(forged, cached=cached)
    world.clock.now = KNOWN_S
    await world.is_unavailable(key, cached=cached)


async def test_a_key_is_known_from_its_last_look_up(world: World, database: Database) -> None:
    key = await make_key(database)
    for _ in range(3):
        await world.enter(key)
        world.clock.now += KNOWN_S - 1
    world.database.lost = True
    await world.enter(key)
    world.clock.now += 1
    await world.is_unavailable(key)


async def test_look_ups_that_hang_open_the_breaker_and_delay_no_caller_then(
    world: World, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await make_key(database)
    await world.enter(key)
    monkeypatch.setattr(database_module, "SHORT_BOUND_SECONDS", 0.02)
    world.database.silent = True
    world.clock.now = 2.0
    for _ in range(FAILURES):
        await world.enter(key)
    asked = world.database.asked
    await asyncio.gather(*(world.enter(key, cached=each % 2 == 0) for each in range(100)))
    await world.is_unavailable(generate_key("live").plaintext)
    await world.is_unavailable(key, cached=False, known=False)
    assert world.database.asked == asked
    world.database.silent = False
    await world.database.ping()
    await revoke(database, key)
    with pytest.raises(RevokedKey):
        await world.enter(key)


@pytest.mark.parametrize("change", ["revoke", "suspend"])
async def test_a_caller_with_an_outdated_policy_is_not_served_under_it(
    world: World, database: Database, change: str
) -> None:
    key = await make_key(database)
    caller = await world.enter(key)
    if change == "revoke":
        await revoke(database, key)
    else:
        async with database.as_operator() as session:
            await suspend(session, "acme")
    world.database.lost = True
    world.clock.now = 2.0
    # Admission refuses the caller's policy, and its new one cannot be read.
    with pytest.raises(DatabaseUnavailable):
        await world.authenticator.renew(await world.enter(key), "inference")
    await world.is_unavailable(key)
    with pytest.raises(DatabaseUnavailable):
        await world.authenticator.confirm(caller, "inference")
    world.database.lost = False
    await world.database.ping()
    with pytest.raises(RevokedKey if change == "revoke" else TenantSuspended):
        await world.enter(key)


async def test_routes_without_admission_ask_what_was_published(world: World, database: Database) -> None:
    key = await make_key(database)
    caller = await world.enter(key, cached=False)
    world.database.lost = True
    world.clock.now = 2.0
    assert await world.enter(key, cached=False) == caller
    assert await world.authenticator.confirm(caller, "inference") == caller
    world.published.away = True
    await world.is_unavailable(key, cached=False)
    with pytest.raises(ValkeyUnavailable):
        await world.authenticator.confirm(caller, "inference")
    world.published.away = False
    assert await world.enter(key, cached=False) == caller
    world.published.epoch = 2
    await world.is_unavailable(key, cached=False)
    world.published.epoch = 1
    await world.is_unavailable(key)


async def test_a_revocation_is_found_where_postgresql_was_only_slow(
    world: World, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await make_key(database)
    caller = await world.enter(key, cached=False)
    await revoke(database, key)
    world.published.epoch = 2
    monkeypatch.setattr(database_module, "SHORT_BOUND_SECONDS", 0.0)
    with pytest.raises(RevokedKey):
        await world.enter(key, cached=False)
    with pytest.raises(RevokedKey):
        await world.authenticator.confirm(caller, "inference")


class Later(datetime):
    """A day after the present."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz) + timedelta(days=1)


async def test_a_known_key_still_expires_and_keeps_its_networks(
    world: World, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with database.as_operator() as session:
        tenant = await TenantRepository(session).create("acme")
        end = datetime.now(UTC) + timedelta(hours=1)
        issued = await KeyRepository(session).create(
            tenant.id, "key", ["inference"], expires_at=end, allowed_cidrs=["192.0.2.0/24"]
        )
    caller = await world.enter(issued.plaintext)
    world.database.lost = True
    world.clock.now = 2.0
    with pytest.raises(AddressNotAllowed):
        await world.authenticator.authenticate(
            bearer(issued.plaintext), "198.51.100.1", cached=True, known=True
        )
    await world.enter(issued.plaintext)
    monkeypatch.setattr(authenticator_module, "datetime", Later)
    with pytest.raises(ExpiredKey):
        await world.enter(issued.plaintext)
    with pytest.raises(ExpiredKey):
        await world.authenticator.confirm(caller, "inference")


async def test_unknown_keys_displace_no_known_one(
    world: World, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_cache, "MAX_UNKNOWN", 4)
    monkeypatch.setattr(key_cache, "MAX_KEYS", 4)
    key = await make_key(database)
    await world.enter(key)
    for number in range(20):
        with pytest.raises(UnknownKey):
            await world.authenticator.authenticate(
                bearer(generate_key("live").plaintext), f"198.51.100.{number}", cached=True, known=True
            )
    world.database.lost = True
    world.clock.now = 2.0
    for _ in range(20):
        await world.is_unavailable(generate_key("live").plaintext)
    assert (await world.enter(key)).tenant_name == "acme"


async def test_without_a_time_no_key_is_known(database: Database) -> None:
    key, losable = await make_key(database), LosableDatabase(database.url)
    authenticator = Authenticator(losable, 0.0, clock=Clock())
    await authenticator.authenticate(bearer(key), cached=True, known=True)
    losable.lost = True
    with pytest.raises(DatabaseUnavailable):
        await authenticator.authenticate(bearer(key), cached=True, known=True)
    await losable.close()
