"""Aliases move back and forth, split requests by weight, and only from where their mover saw them."""

import asyncio
from collections import Counter
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from tests.tenants.registry_records import AliasWriter, RegistryWriter, add, make_tenant

from loraplex.tenants.database import Database
from loraplex.tenants.errors import (
    AdapterNotFound,
    AliasMoved,
    AliasNotFound,
    InvalidField,
    InvalidName,
    NoPreviousVersion,
    VersionNotFound,
    VersionNotReady,
)
from loraplex.tenants.registry.aliases import choose_target
from loraplex.tenants.registry.records import ABSENT


async def prepared(database: Database, versions: int = 2) -> UUID:
    tenant_id = await make_tenant(database)
    async with database.as_tenant(tenant_id) as session:
        for number in range(versions):
            await add(RegistryWriter(session, tenant_id), number)
    return tenant_id


async def test_alias_moves_and_rolls_back(database: Database) -> None:
    tenant_id = await prepared(database)
    async with database.as_tenant(tenant_id) as session:
        aliases = AliasWriter(session, tenant_id)
        await aliases.set("support", "production", {1: 100})
        with pytest.raises(NoPreviousVersion):
            await aliases.rollback("support", "production")
        await aliases.set("support", "production", {2: 100})
        again = await aliases.set("support", "production", {2: 100})
        assert (again.revision, again.targets, again.previous_targets) == (2, {2: 100}, {1: 100})
        back = await aliases.rollback("support", "production")
        assert (back.revision, back.version) == (3, 1)
        assert (await aliases.rollback("support", "production")).version == 2
        assert [(alias.alias, alias.version) for alias in await aliases.list("support")] == [
            ("production", 2)
        ]


async def test_a_split_goes_back_as_a_whole(database: Database) -> None:
    tenant_id = await prepared(database, 3)
    async with database.as_tenant(tenant_id) as session:
        aliases = AliasWriter(session, tenant_id)
        await aliases.set("support", "production", {1: 90, 3: 10})
        await aliases.set("support", "production", {3: 100})
        assert (await aliases.rollback("support", "production")).targets == {1: 90, 3: 10}
        with pytest.raises(VersionNotReady):
            await session.execute(text("UPDATE adapter_versions SET state = 'quarantined' WHERE version = 3"))
            await aliases.rollback("support", "production")


async def test_only_who_saw_the_present_place_may_move(database: Database) -> None:
    tenant_id = await prepared(database)
    async with database.as_tenant(tenant_id) as session:
        aliases = AliasWriter(session, tenant_id)
        first = await aliases.set("support", "canary", {1: 100}, expected=ABSENT)
        await aliases.set("support", "canary", {2: 100}, expected=first.revision)
        for stale in (ABSENT, first.revision, 99):
            with pytest.raises(AliasMoved):
                await aliases.set("support", "canary", {1: 100}, expected=stale)
            with pytest.raises(AliasMoved):
                await aliases.rollback("support", "canary", expected=stale)
            with pytest.raises(AliasMoved):
                await aliases.delete("support", "canary", expected=stale)
        await aliases.delete("support", "canary", expected=2)
        with pytest.raises(AliasNotFound):
            await aliases.get("support", "canary")


async def test_of_two_movers_one_wins(database: Database) -> None:
    tenant_id = await prepared(database)

    async def move(version: int) -> bool:
        try:
            async with database.as_tenant(tenant_id) as session:
                await AliasWriter(session, tenant_id).set("support", "a", {version: 100}, expected=ABSENT)
        except AliasMoved:
            return False
        return True

    assert sorted(await asyncio.gather(move(1), move(2))) == [False, True]


@pytest.mark.parametrize(
    "targets", [{}, {1: 99}, {1: 101}, {1: 100, 2: 0}, {1: 150, 2: -50}, dict.fromkeys(range(1, 12), 9)]
)
async def test_splits_that_are_refused(database: Database, targets: dict[int, int]) -> None:
    tenant_id = await prepared(database)
    async with database.as_tenant(tenant_id) as session:
        with pytest.raises(InvalidField, match="split"):
            await AliasWriter(session, tenant_id).set("support", "production", targets)


async def test_the_database_holds_the_weights_too(database: Database) -> None:
    tenant_id = await prepared(database)
    async with database.as_tenant(tenant_id) as session:
        await AliasWriter(session, tenant_id).set("support", "production", {1: 100})
    more = "INSERT INTO alias_targets SELECT adapter_id, alias, 1, 2, tenant_id, 5 FROM adapter_aliases"
    with pytest.raises(IntegrityError, match="sum to 100"):
        async with database.as_tenant(tenant_id) as session:
            await session.execute(text(more))
    async with database.as_tenant(tenant_id) as session:
        assert (await AliasWriter(session, tenant_id).get("support", "production")).targets == {1: 100}


async def test_what_does_not_exist(database: Database) -> None:
    tenant_id = await prepared(database, 1)
    async with database.as_tenant(tenant_id) as session:
        aliases = AliasWriter(session, tenant_id)
        with pytest.raises(VersionNotFound):
            await aliases.set("support", "production", {2: 100})
        with pytest.raises(VersionNotFound):
            await aliases.set("support", "production", {2**40: 100})
        with pytest.raises(InvalidName):
            await aliases.set("support", "a b", {1: 100})
        with pytest.raises(AdapterNotFound):
            await aliases.list("other")
        for name in ("production", "a\x00"):
            with pytest.raises(AliasNotFound):
                await aliases.rollback("support", name)


async def test_who_points_to_a_version(database: Database) -> None:
    tenant_id = await prepared(database, 3)
    async with database.as_tenant(tenant_id) as session:
        aliases, adapter = (
            AliasWriter(session, tenant_id),
            await RegistryWriter(session, tenant_id).get("support"),
        )
        await aliases.set("support", "production", {1: 100})
        await aliases.set("support", "production", {2: 50, 3: 50})
        await aliases.set("support", "canary", {3: 100})
        assert [list(await aliases.pointing_to(adapter, version)) for version in (1, 2, 3)] == [
            [],
            ["production"],
            ["canary", "production"],
        ]


@given(st.lists(st.integers(1, 97), min_size=1, max_size=4), st.text(max_size=30))
def test_a_user_stays_where_it_is(weights: list[int], user: str) -> None:
    adapter_id = UUID(int=7)
    targets = dict(enumerate(weights, 1))
    chosen = choose_target(adapter_id, "production", targets, user)
    assert chosen in targets and chosen == choose_target(adapter_id, "production", targets, user)
    newest = max(targets)
    if chosen == newest and len(targets) > 1:
        grown = {**targets, 1: targets[1] - 1, newest: targets[newest] + 1}
        grown = {version: weight for version, weight in grown.items() if weight}
        assert choose_target(adapter_id, "production", grown, user) == newest


def test_shares_are_as_asked() -> None:
    adapter_id = uuid4()
    counts = Counter(choose_target(adapter_id, "a", {3: 90, 4: 10}, f"user {i}") for i in range(5000))
    assert 0.07 < counts[4] / 5000 < 0.13
