"""A model reference means one ready version of the tenant's own, or nothing."""

from typing import Any

import pytest
from sqlalchemy import text
from tests.tenants.registry_records import (
    AliasWriter,
    RegistryWriter,
    add,
    digest,
    make_tenant,
    set_state,
    unit,
)
from tests.tenants.registry_records import delete as delete_of

from loraplex.tenants.administration.calibrations import calibrate
from loraplex.tenants.database import Database
from loraplex.tenants.errors import AdapterNotFound, ProfileFixed, VersionNotReady
from loraplex.tenants.registry.adapters import profile_of
from loraplex.tenants.registry.records import AdapterProfile
from loraplex.tenants.registry.resolution import ModelResolver


async def resolved(served: ModelResolver, model: str, sticky: str = "") -> tuple[int, str, str | None] | None:
    found = await served.resolve(model, sticky)
    return None if found is None else (found.version, found.digest, found.alias)


async def test_resolve_alias_and_pinned_version(database: Database) -> None:
    tenant_id = await make_tenant(database)
    async with database.as_tenant(tenant_id) as session:
        adapters, aliases = RegistryWriter(session, tenant_id), AliasWriter(session, tenant_id)
        served = ModelResolver(session, tenant_id)
        for number in (1, 2):
            await add(adapters, number)
        assert await resolved(served, "support") is None
        await aliases.set("support", "production", {1: 100})
        await aliases.set("support", "canary", {2: 100})
        assert await resolved(served, "support") == (1, digest(1), "production")
        assert await resolved(served, "support:canary") == (2, digest(2), "canary")
        assert await resolved(served, "support@2") == (2, digest(2), None)
        absent = (
            "support@3",
            "support:none",
            "other",
            "",
            "support@0",
            "support@",
            "support:",
            "support@1:a",
        )
        for model in absent:
            assert await resolved(served, model) is None


async def test_a_calibration_is_of_weights_and_of_a_way_to_read(database: Database) -> None:
    tenant_id, others = await make_tenant(database), await make_tenant(database, "others")
    for owner in (others, tenant_id):
        async with database.as_tenant(owner) as session:
            adapters, served = RegistryWriter(session, owner), ModelResolver(session, owner)
            for number in (1, 2, 3):
                await add(adapters, number)
            await AliasWriter(session, owner).set("support", "production", {1: 100})
            await adapters.add_version(
                "support",
                digest=digest(1),
                size_bytes=1,
                rank=8,
                config={},
                report={},
                profile=AdapterProfile(decision={"read": "values"}),
            )
            if owner == others:
                continue
            held: dict[str, Any] = {
                "system_fingerprint": "fp",
                "format": "1",
                "temperatures": {"choice": 2.0},
                "report": {},
            }
            written = await calibrate(unit(session, owner), owner, "support", 1, **held)
            found = [await served.resolve(f"support@{version}") for version in (1, 2, 3, 4)]
            assert [[each["sha256"] for each in one.calibrations] for one in found if one] == [
                *([written.sha256], [], [], []),
            ]
            again = await calibrate(unit(session, owner), owner, "support", 4, **held)
            assert (again.read, written.read) == ("values", "labels") and again.sha256 != written.sha256
    async with database.as_tenant(others) as session:
        theirs = await ModelResolver(session, others).resolve("support@1")
        assert theirs is not None and theirs.calibrations == ()


async def test_a_split_sends_each_user_to_one_version(database: Database) -> None:
    tenant_id = await make_tenant(database)
    async with database.as_tenant(tenant_id) as session:
        adapters, served = RegistryWriter(session, tenant_id), ModelResolver(session, tenant_id)
        for number in (1, 2):
            await add(adapters, number)
        await AliasWriter(session, tenant_id).set("support", "production", {1: 50, 2: 50})
        users = [f"user {i}" for i in range(40)]
        first = [await resolved(served, "support", user) for user in users]
        assert {found[0] for found in first if found} == {1, 2}
        assert [await resolved(served, "support", user) for user in users] == first
        assert [each.version for each in await served.list()] == [2]
        await session.execute(text("UPDATE adapter_versions SET state = 'quarantined' WHERE version = 2"))
        left = [await resolved(served, "support", user) for user in users]
        assert left == [(1, digest(1), "production")] * len(users)


@pytest.mark.parametrize(
    "state", ["uploading", "validating", "rejected", "deleting", "quarantined", "deprecated"]
)
async def test_only_ready_versions_resolve(database: Database, state: str) -> None:
    tenant_id = await make_tenant(database)
    async with database.as_tenant(tenant_id) as session:
        served = ModelResolver(session, tenant_id)
        await add(RegistryWriter(session, tenant_id), 1)
        await AliasWriter(session, tenant_id).set("support", "production", {1: 100})
        await set_state(session, state)
        assert await resolved(served, "support") is None
        assert await resolved(served, "support@1") is None
        with pytest.raises(VersionNotReady, match=state):
            await AliasWriter(session, tenant_id).set("support", "canary", {1: 100})


async def test_another_tenants_adapter_is_invisible(database: Database) -> None:
    mine, other = await make_tenant(database, "acme"), await make_tenant(database, "other")
    async with database.as_tenant(mine) as session:
        await add(RegistryWriter(session, mine), 1)
        await AliasWriter(session, mine).set("support", "production", {1: 100})
    async with database.as_operator() as session:
        adapters, served = RegistryWriter(session, other), ModelResolver(session, other)
        for model in ("support", "support:production", "support@1"):
            assert await served.resolve(model) is None
        assert await adapters.list() == [] and await served.list() == []
        with pytest.raises(AdapterNotFound):
            await delete_of(session, other, "support")
        assert (await add(adapters, 1)).version == 1
    async with database.as_tenant(mine) as session:
        assert await resolved(ModelResolver(session, mine), "support") == (1, digest(1), "production")


async def test_delete_frees_the_name(database: Database) -> None:
    tenant_id = await make_tenant(database)
    async with database.as_tenant(tenant_id) as session:
        adapters, served = RegistryWriter(session, tenant_id), ModelResolver(session, tenant_id)
        await add(adapters, 1)
        await AliasWriter(session, tenant_id).set("support", "production", {1: 100})
        await delete_of(session, tenant_id, "support")
        for model in ("support", "support@1"):
            assert await served.resolve(model) is None
        assert await adapters.list() == []
        assert (await add(adapters, 2)).version == 1
        assert await resolved(served, "support@1") == (1, digest(2), None)


async def test_a_profile_is_fixed_by_the_first_alias(database: Database) -> None:
    tenant_id = await make_tenant(database)
    async with database.as_tenant(tenant_id) as session:
        adapters, aliases = RegistryWriter(session, tenant_id), AliasWriter(session, tenant_id)
        version = (await add(adapters, 1)).version
        await adapters.change_profile("support", version, {"tool_style": "hermes"})
        changed = await adapters.change_profile("support", version, {"defaults": {"top_k": 5}})
        assert changed.reasoning_style is None
        markers = {"start": "<plan>", "end": "</plan>"}
        changed = await adapters.change_profile("support", version, {"reasoning_style": markers})
        assert profile_of(changed) == AdapterProfile("hermes", {"top_k": 5}, markers)
        found = await ModelResolver(session, tenant_id).resolve("support@1")
        assert found is not None and (found.tool_style, found.defaults) == ("hermes", {"top_k": 5})
        assert found.reasoning_style == markers
        await aliases.set("support", "canary", {version: 100})
        with pytest.raises(ProfileFixed, match="version 1"):
            await adapters.change_profile("support", version, {"tool_style": None})
        await add(adapters, 2)
        await aliases.set("support", "canary", {2: 100})
        with pytest.raises(ProfileFixed):
            await adapters.change_profile("support", version, {"reasoning_style": None})
    async with database.as_tenant(tenant_id) as session:
        assert (await RegistryWriter(session, tenant_id).version("support", 1)).tool_style == "hermes"
        served = await ModelResolver(session, tenant_id).resolve("support:canary")
        assert served is not None and (served.version, served.tool_style, served.defaults) == (2, None, {})
