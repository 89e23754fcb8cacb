"""The adapter catalogue: names, immutable versions and their profiles."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tenants.registry_records import AliasWriter, RegistryWriter, add, digest, make_tenant

from loraplex.tenants.database import Database
from loraplex.tenants.errors import AdapterNotFound, InvalidName, VersionNotFound
from loraplex.tenants.models import AdapterVersion
from loraplex.tenants.registry.adapters import profile_of
from loraplex.tenants.registry.records import AdapterProfile
from loraplex.tenants.registry.resolution import parse_model_reference


async def test_versions_count_up_and_a_digest_is_stored_once(database: Database) -> None:
    tenant_id = await make_tenant(database, "acme")
    async with database.as_operator() as session:
        adapters = RegistryWriter(session, tenant_id)
        first, second, again = [await add(adapters, number) for number in (1, 2, 1)]
        assert (first.version, second.version, again.id) == (1, 2, first.id)
        assert [record.version for record in await adapters.versions("support")] == [1, 2]


async def test_a_rejected_digest_may_be_tried_again(database: Database) -> None:
    tenant_id = await make_tenant(database, "acme")
    async with database.as_operator() as session:
        adapters = RegistryWriter(session, tenant_id)
        assert [(await add(adapters, 1, state)).version for state in ("rejected", "ready")] == [1, 2]


async def test_numbers_are_given_without_races(database: Database) -> None:
    tenant_id = await make_tenant(database, "acme")

    async def push(number: int) -> int:
        async with database.as_operator() as session:
            return (await add(RegistryWriter(session, tenant_id), number)).version

    versions = await asyncio.gather(*(push(number) for number in range(12)))
    assert sorted(versions) == list(range(1, 13))
    assert await asyncio.gather(*(push(100) for _ in range(6))) == [13] * 6


async def test_what_does_not_exist(database: Database) -> None:
    tenant_id = await make_tenant(database, "acme")
    async with database.as_operator() as session:
        adapters = RegistryWriter(session, tenant_id)
        for name in ("support", "a\x00"):
            with pytest.raises(AdapterNotFound):
                await adapters.versions(name)


@pytest.mark.parametrize("name", ["", "Voice", "a:b", "a@1", "a/b", "../x", "-a", "a" * 64, "a\n", "ü"])
async def test_adapter_names_that_are_refused(database: Database, name: str) -> None:
    tenant_id = await make_tenant(database, "acme")
    async with database.as_operator() as session:
        with pytest.raises(InvalidName, match="adapter name"):
            await RegistryWriter(session, tenant_id).get_or_create(name)


@given(st.text(alphabet="ab1.:@_-/ \n\x00", max_size=20))
def test_references_read_one_way(model: str) -> None:
    reference = parse_model_reference(model)
    if reference is not None:
        tail = f"@{reference.version}" if reference.alias is None else f":{reference.alias}"
        assert model in (reference.name + tail, reference.name)
        assert (reference.alias is None) != (reference.version is None)


HERMES = AdapterProfile("hermes", {"temperature": 0.2})


async def test_equal_content_with_another_profile(database: Database) -> None:
    tenant_id = await make_tenant(database, "acme")
    async with database.as_operator() as session:
        adapters = RegistryWriter(session, tenant_id)
        await adapters.get_or_create("support")

        async def push(profile: AdapterProfile | None) -> AdapterVersion:
            return await adapters.add_version(
                "support", digest=digest(1), size_bytes=1, rank=8, config={}, report={}, profile=profile
            )

        first = await push(None)
        assert (await push(HERMES)).version == first.version == 1, "no alias yet: it takes the profile over"
        await AliasWriter(session, tenant_id).set("support", "production", {1: 100})
        assert (await push(HERMES)).version == 1
        assert (await push(AdapterProfile())).version == 2, "fixed: the same content under a new number"
        assert [(await push(profile)).version for profile in (HERMES, None)] == [1, 2]
        assert profile_of(await adapters.version("support", 1)) == HERMES


async def test_profiles_of_what_does_not_exist(database: Database) -> None:
    mine, other = await make_tenant(database, "acme"), await make_tenant(database, "other")
    async with database.as_operator() as session:
        await add(RegistryWriter(session, mine), 1)
        adapters = RegistryWriter(session, other)
        with pytest.raises(AdapterNotFound):
            await adapters.change_profile("support", 1, {"tool_style": "hermes"})
        await adapters.get_or_create("support")
        for number in (0, 1, -1, 2**31, 2**70):
            with pytest.raises(VersionNotFound):
                await adapters.change_profile("support", number, {"tool_style": "hermes"})
