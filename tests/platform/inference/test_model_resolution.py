"""Names and lists of models while PostgreSQL is away: as they were read under the caller's policy, or 503, and never 404."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from tests.platform.auth.authentication import Clock
from tests.platform.web.test_planes import caller_of
from tests.tenants.registry_records import AliasWriter, RegistryWriter, make_tenant

from loraplex.platform.auth.authenticator import Caller
from loraplex.platform.errors import ModelNotFound
from loraplex.platform.inference import model_resolution
from loraplex.platform.inference.dependencies import ServingConfig
from loraplex.platform.inference.model_resolution import KnownModels
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable

KNOWN_S = 300.0


class LosableDatabase(Database):
    """`lost`: connections are refused."""

    lost = False

    @asynccontextmanager
    async def as_tenant(self, tenant_id: UUID) -> AsyncIterator[AsyncSession]:
        if self.lost:
            raise DatabaseUnavailable("refused")
        async with super().as_tenant(tenant_id) as session:
            yield session


def dependencies_of(database: Database) -> Any:
    return SimpleNamespace(
        database=database, served_model_name="base", config=ServingConfig(known_caller_s=KNOWN_S)
    )


class World:
    """One gateway's models, and a caller whose tenant has the adapter `pirate`."""

    def __init__(self, database: LosableDatabase, caller: Caller) -> None:
        self.database, self.caller, self.clock = database, caller, Clock()
        self.dependencies = dependencies_of(database)
        self.models = KnownModels(self.dependencies, self.clock)

    async def listed(self) -> list[str]:
        return [model.name for model in await self.models.list(self.caller)]


@pytest.fixture
async def world(database: Database) -> AsyncIterator[World]:
    losable = LosableDatabase(database.url)
    tenant_id = await make_tenant(database)
    async with database.as_tenant(tenant_id) as session:
        adapters = RegistryWriter(session, tenant_id)
        await adapters.get_or_create("pirate")
        version = await adapters.add_version(
            "pirate", digest="a" * 64, size_bytes=1, rank=8, config={}, report={}
        )
        await AliasWriter(session, tenant_id).set("pirate", "production", {version.version: 100})
    yield World(losable, await caller_of(database, tenant_id))
    await losable.close()


async def test_names_that_were_read_are_resolved_and_others_are_unavailable(world: World) -> None:
    asked, read = world.models.resolve(world.caller, "pirate", "r"), world.models.read(world.caller, "pirate")
    assert (await asked).digest == (await read).digest == "a" * 64
    with pytest.raises(ModelNotFound):
        await world.models.read(world.caller, "parrot")
    world.database.lost = True
    assert (await world.models.read(world.caller, "pirate")).adapter == "pirate@1"
    assert (await world.models.resolve(world.caller, "pirate", "r")).adapter == "pirate@1"
    assert (await world.models.read(world.caller, "base")).adapter is None
    newer = replace(world.caller, policy_epoch=world.caller.policy_epoch + 1)
    for caller, name in ((world.caller, "parrot"), (newer, "pirate")):
        with pytest.raises(DatabaseUnavailable):
            await world.models.read(caller, name)
        with pytest.raises(DatabaseUnavailable):
            await world.models.resolve(caller, name, "r")


async def test_a_list_is_shown_again_for_a_while_to_callers_of_its_policy(world: World) -> None:
    assert await world.listed() == ["base", "pirate"]
    world.database.lost = True
    world.clock.now = KNOWN_S - 1
    assert await world.listed() == ["base", "pirate"]
    newer = replace(world.caller, policy_epoch=world.caller.policy_epoch + 1)
    with pytest.raises(DatabaseUnavailable):
        await world.models.list(newer)
    world.clock.now = KNOWN_S
    with pytest.raises(DatabaseUnavailable):
        await world.listed()


async def test_a_list_over_its_bound_is_not_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_resolution, "MAX_TENANT_BYTES", model_resolution.VERSION_BYTES)
    world.models = KnownModels(world.dependencies, world.clock)
    await world.listed()
    world.database.lost = True
    with pytest.raises(DatabaseUnavailable):
        await world.listed()
