"""Every use case leaves the same rows and the same audit entries over HTTP and by its command; a refused one leaves nothing."""

from collections.abc import AsyncIterator
from inspect import iscoroutinefunction
from pathlib import Path
from types import ModuleType

import pytest
from tests.platform.services import account_use_cases as accounts
from tests.platform.services.use_case import UseCase, Way
from tests.platform.services.walked_world import (
    Dump,
    World,
    author_of,
    command_author,
    comparable,
    entries_since,
    open_world,
)

from loraplex.platform.services import api_keys, quotas, tenants
from loraplex.platform.services.unit_of_work import UnitOfWork

ALL = (*accounts.TENANTS, *accounts.KEYS, *accounts.LIMITS)
WALKED = (tenants, api_keys, quotas)


@pytest.fixture
async def world(
    database_url: str, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[World]:
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("REDIS_URL", valkey_url)
    monkeypatch.setenv("LORAPLEX_DATA_DIR", str(tmp_path))
    async with open_world(database_url, valkey_url, tmp_path / "uploads") as opened:
        yield opened


async def walk(world: World, use_case: UseCase, way: Way, refused: Way) -> tuple[Dump, Dump]:
    """Return all rows before and after. The refused way comes first and leaves nothing."""
    await world.begin()
    if use_case.given is not None:
        await use_case.given(world)
    before = world.dump()
    refusal = await refused(world)
    assert not refusal.accepted, refusal.detail
    assert world.dump() == before
    outcome = await way(world)
    assert outcome.accepted, outcome.detail
    return before, world.dump()


@pytest.mark.parametrize("use_case", ALL, ids=lambda each: each.name)
async def test_http_and_command_leave_the_same(world: World, use_case: UseCase) -> None:
    before, by_http = await walk(world, use_case, use_case.http, use_case.refused_http)
    entries = entries_since(before, by_http)
    assert tuple(entry["action"] for entry in entries) == use_case.entries
    keys = {world.admin_key.split("_")[2]: "key", world.operator_key.split("_")[2]: "operator"}
    for entry in entries:
        kind, name, has_request = author_of(entry)
        assert keys[name] == kind and has_request
    await assert_published(world, before)
    if use_case.command is None or use_case.refused_command is None:
        return
    before, by_command = await walk(world, use_case, use_case.command, use_case.refused_command)
    assert {author_of(entry) for entry in entries_since(before, by_command)} == {command_author()}
    await assert_published(world, before)
    assert comparable(by_command) == comparable(by_http)


async def assert_published(world: World, before: Dump) -> None:
    """Every gateway was notified of the tenants whose policy has changed."""
    known = {row["id"]: row["policy_epoch"] for row in before["tenants"]}
    epochs = await world.published()
    for row in world.dump()["tenants"]:
        present, newest = epochs[row["name"]]
        if present != known.get(row["id"]):
            assert newest == present, row["name"]


@pytest.mark.parametrize("module", WALKED, ids=lambda each: each.__name__.rpartition(".")[2])
def test_every_use_case_is_walked(module: ModuleType) -> None:
    """A use case is a public coroutine function whose first argument is a unit of work."""
    found = {
        each
        for name, each in vars(module).items()
        if iscoroutinefunction(each)
        and not name.startswith("_")
        and next(iter(each.__annotations__.values()), None) is UnitOfWork
    }
    assert found and found <= {use_case.function for use_case in ALL}
