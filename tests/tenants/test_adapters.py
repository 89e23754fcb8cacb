"""The adapter catalogue: immutable versions, aliases that move back and forth, and walls between tenants."""

import asyncio
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.accounts import TenantRepository
from loraplex.tenants.adapter_profile import AdapterProfile
from loraplex.tenants.adapters import AdapterRepository, profile_of
from loraplex.tenants.database import Database
from loraplex.tenants.errors import (
    AdapterNotFound,
    AliasNotFound,
    InvalidName,
    NoPreviousVersion,
    ProfileFixed,
    VersionNotFound,
    VersionNotReady,
)
from loraplex.tenants.model_reference import parse_model_reference
from loraplex.tenants.models import AdapterVersion


def digest(number: int) -> str:
    return f"{number:064x}"


async def make_tenant(database: Database, name: str) -> UUID:
    async with database.transaction() as session:
        return (await TenantRepository(session).create(name)).id


async def add(adapters: AdapterRepository, number: int, state: str = "ready") -> AdapterVersion:
    await adapters.get_or_create("support")
    return await adapters.add_version(
        "support", digest=digest(number), size_bytes=10, rank=8, config={"r": 8}, report={}, state=state
    )


async def test_versions_count_up_and_a_digest_is_stored_once(database: Database) -> None:
    tenant_id = await make_tenant(database, "acme")
    async with database.transaction() as session:
        adapters = AdapterRepository(session, tenant_id)
        first, second, again = [await add(adapters, number) for number in (1, 2, 1)]
        assert (first.version, second.version, again.id) == (1, 2, first.id)
        assert [record.version for record in await adapters.versions("support")] == [1, 2]


async def test_a_rejected_digest_may_be_tried_again(database: Database) -> None:
    tenant_id = await make_tenant(database, "acme")
    async with database.transaction() as session:
        adapters = AdapterRepository(session, tenant_id)
        assert [(await add(adapters, 1, state)).version for state in ("rejected", "ready")] == [1, 2]


async def test_numbers_are_given_without_races(database: Database) -> None:
    tenant_id = await make_tenant(database, "acme")

    async def push(number: int) -> int:
        async with database.transaction() as session:
            return (await add(AdapterRepository(session, tenant_id), number)).version

    versions = await asyncio.gather(*(push(number) for number in range(12)))
    assert sorted(versions) == list(range(1, 13))
    assert await asyncio.gather(*(push(100) for _ in range(6))) == [13] * 6


async def resolved(adapters: AdapterRepository, model: str) -> tuple[int, str, str | None] | None:
    found = await adapters.resolve(model)
    return None if found is None else (found.version, found.digest, found.alias)


async def test_resolve_alias_and_pinned_version(database: Database) -> None:
    tenant_id = await make_tenant(database, "acme")
    async with database.transaction() as session:
        adapters = AdapterRepository(session, tenant_id)
        for number in (1, 2):
            await add(adapters, number)
        assert await resolved(adapters, "support") is None
        await adapters.set_alias("support", "production", 1)
        await adapters.set_alias("support", "canary", 2)
        assert await resolved(adapters, "support") == (1, digest(1), "production")
        assert await resolved(adapters, "support:canary") == (2, digest(2), "canary")
        assert await resolved(adapters, "support@2") == (2, digest(2), None)
        for absent in (
            "support@3",
            "support:none",
            "other",
            "",
            "support@0",
            "support@",
            "support:",
            "support@1:a",
        ):
            assert await resolved(adapters, absent) is None


@pytest.mark.parametrize(
    "state", ["uploading", "validating", "rejected", "deleting", "quarantined", "deprecated"]
)
async def test_only_ready_versions_resolve(database: Database, state: str) -> None:
    tenant_id = await make_tenant(database, "acme")
    async with database.transaction() as session:
        adapters = AdapterRepository(session, tenant_id)
        await add(adapters, 1)
        await adapters.set_alias("support", "production", 1)
        await set_state(session, state)
        assert await resolved(adapters, "support") is None
        assert await resolved(adapters, "support@1") is None
        with pytest.raises(VersionNotReady, match=state):
            await adapters.set_alias("support", "canary", 1)


async def set_state(session: AsyncSession, state: str) -> None:
    await session.execute(text("UPDATE adapter_versions SET state = :state"), {"state": state})


async def test_alias_moves_and_rolls_back(database: Database) -> None:
    tenant_id = await make_tenant(database, "acme")
    async with database.transaction() as session:
        adapters = AdapterRepository(session, tenant_id)
        for number in (1, 2):
            await add(adapters, number)
        await adapters.set_alias("support", "production", 1)
        with pytest.raises(NoPreviousVersion):
            await adapters.rollback("support", "production")
        await adapters.set_alias("support", "production", 2)
        await adapters.set_alias("support", "production", 2)
        assert (await adapters.rollback("support", "production")).version == 1
        assert await resolved(adapters, "support") == (1, digest(1), "production")
        assert (await adapters.rollback("support", "production")).version == 2
        assert [(alias.alias, alias.version) for alias in await adapters.aliases("support")] == [
            ("production", 2)
        ]


async def test_what_does_not_exist(database: Database) -> None:
    tenant_id = await make_tenant(database, "acme")
    async with database.transaction() as session:
        adapters = AdapterRepository(session, tenant_id)
        with pytest.raises(AdapterNotFound):
            await adapters.versions("support")
        await add(adapters, 1)
        with pytest.raises(VersionNotFound):
            await adapters.set_alias("support", "production", 2)
        with pytest.raises(AliasNotFound):
            await adapters.rollback("support", "production")
        with pytest.raises(InvalidName):
            await adapters.set_alias("support", "a b", 1)
        with pytest.raises(VersionNotFound):
            await adapters.set_alias("support", "production", 2**40)
        with pytest.raises(AdapterNotFound):
            await adapters.versions("a\x00")
        with pytest.raises(AliasNotFound):
            await adapters.rollback("support", "a\x00")


async def test_another_tenants_adapter_is_invisible(database: Database) -> None:
    mine, other = await make_tenant(database, "acme"), await make_tenant(database, "other")
    async with database.transaction() as session:
        await add(AdapterRepository(session, mine), 1)
        await AdapterRepository(session, mine).set_alias("support", "production", 1)
    async with database.transaction() as session:
        adapters = AdapterRepository(session, other)
        for model in ("support", "support:production", "support@1"):
            assert await adapters.resolve(model) is None
        assert await adapters.list() == [] and await adapters.served() == []
        with pytest.raises(AdapterNotFound):
            await adapters.delete("support")
        assert (await add(adapters, 1)).version == 1
    async with database.transaction() as session:
        assert await resolved(AdapterRepository(session, mine), "support") == (1, digest(1), "production")


async def test_delete_frees_the_name(database: Database) -> None:
    tenant_id = await make_tenant(database, "acme")
    async with database.transaction() as session:
        adapters = AdapterRepository(session, tenant_id)
        await add(adapters, 1)
        await adapters.set_alias("support", "production", 1)
        await adapters.delete("support")
        for model in ("support", "support@1"):
            assert await adapters.resolve(model) is None
        assert await adapters.list() == []
        assert (await add(adapters, 2)).version == 1
        assert await resolved(adapters, "support@1") == (1, digest(2), None)


@pytest.mark.parametrize("name", ["", "Voice", "a:b", "a@1", "a/b", "../x", "-a", "a" * 64, "a\n", "ü"])
async def test_adapter_names_that_are_refused(database: Database, name: str) -> None:
    tenant_id = await make_tenant(database, "acme")
    async with database.transaction() as session:
        with pytest.raises(InvalidName, match="adapter name"):
            await AdapterRepository(session, tenant_id).get_or_create(name)


@given(st.text(alphabet="ab1.:@_-/ \n\x00", max_size=20))
def test_references_read_one_way(model: str) -> None:
    reference = parse_model_reference(model)
    if reference is not None:
        tail = f"@{reference.version}" if reference.alias is None else f":{reference.alias}"
        assert model in (reference.name + tail, reference.name)
        assert (reference.alias is None) != (reference.version is None)


HERMES = AdapterProfile("hermes", {"temperature": 0.2})


async def test_a_profile_is_fixed_by_the_first_alias(database: Database) -> None:
    tenant_id = await make_tenant(database, "acme")
    async with database.transaction() as session:
        adapters = AdapterRepository(session, tenant_id)
        version = (await add(adapters, 1)).version
        await adapters.change_profile("support", version, {"tool_style": "hermes"})
        changed = await adapters.change_profile("support", version, {"defaults": {"top_k": 5}})
        assert profile_of(changed) == AdapterProfile("hermes", {"top_k": 5})
        found = await adapters.resolve("support@1")
        assert found is not None and (found.tool_style, found.defaults) == ("hermes", {"top_k": 5})
        await adapters.set_alias("support", "canary", version)
        with pytest.raises(ProfileFixed, match="version 1"):
            await adapters.change_profile("support", version, {"tool_style": None})
        await add(adapters, 2)
        await adapters.set_alias("support", "canary", 2)
        with pytest.raises(ProfileFixed):
            await adapters.change_profile("support", version, {"tool_style": None})
    async with database.transaction() as session:
        adapters = AdapterRepository(session, tenant_id)
        assert (await adapters.version("support", 1)).tool_style == "hermes"
        (served,) = [await adapters.resolve("support:canary")]
        assert served is not None and (served.version, served.tool_style, served.defaults) == (2, None, {})


async def test_equal_content_with_another_profile(database: Database) -> None:
    tenant_id = await make_tenant(database, "acme")
    async with database.transaction() as session:
        adapters = AdapterRepository(session, tenant_id)
        await adapters.get_or_create("support")

        async def push(profile: AdapterProfile | None) -> AdapterVersion:
            return await adapters.add_version(
                "support", digest=digest(1), size_bytes=1, rank=8, config={}, report={}, profile=profile
            )

        first = await push(None)
        assert (await push(HERMES)).version == first.version == 1, "no alias yet: it takes the profile over"
        await adapters.set_alias("support", "production", 1)
        assert (await push(HERMES)).version == 1
        assert (await push(AdapterProfile())).version == 2, "fixed: the same content under a new number"
        assert [(await push(profile)).version for profile in (HERMES, None)] == [1, 2]
        assert profile_of(await adapters.version("support", 1)) == HERMES


async def test_profiles_of_what_does_not_exist(database: Database) -> None:
    mine, other = await make_tenant(database, "acme"), await make_tenant(database, "other")
    async with database.transaction() as session:
        await add(AdapterRepository(session, mine), 1)
        adapters = AdapterRepository(session, other)
        with pytest.raises(AdapterNotFound):
            await adapters.change_profile("support", 1, {"tool_style": "hermes"})
        await adapters.get_or_create("support")
        for number in (0, 1, -1, 2**31, 2**70):
            with pytest.raises(VersionNotFound):
                await adapters.change_profile("support", number, {"tool_style": "hermes"})
