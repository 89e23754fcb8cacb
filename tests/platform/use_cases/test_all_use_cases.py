"""Every use case leaves the same rows and the same audit entries over HTTP and by its command; a refused one leaves nothing."""

from collections.abc import AsyncIterator
from importlib import import_module
from inspect import iscoroutinefunction
from itertools import chain
from pathlib import Path
from pkgutil import walk_packages
from typing import Final

import pytest
from tests.platform.use_cases import account_use_cases as accounts
from tests.platform.use_cases import adapter_use_cases as of_adapters
from tests.platform.use_cases import evaluation_use_cases as of_evaluations
from tests.platform.use_cases import invoice_use_cases as of_invoices
from tests.platform.use_cases import people_use_cases as of_people
from tests.platform.use_cases.use_case import UseCase, Way
from tests.platform.use_cases.walked_world import (
    Dump,
    World,
    author_of,
    command_author,
    comparable,
    entries_since,
    open_world,
)

from loraplex import adapters, tenants
from loraplex.adapters.versions.lifecycle import register_folder
from loraplex.adapters.versions.pending_folders import GATEWAYS_LOCK, PENDING_FOLDER, PendingFolders
from loraplex.platform import auth
from loraplex.tenants import installation
from loraplex.tenants.actors import Actor
from loraplex.tenants.administration import canaries
from loraplex.tenants.audit_log import author_behind
from loraplex.tenants.billing import use_cases as rate_cards
from loraplex.tenants.invoices import use_cases as invoices
from loraplex.tenants.ledger.journal.folder import JOURNAL_FOLDER
from loraplex.tenants.unit_of_work import UnitOfWork

# A gateway's start and its jobs are the only ways: see `test_prices.py` and `test_recognized_secret.py` in `../server`, and
# `test_month_closing.py` and `test_canary_watch.py` in `../jobs`.
RUN_BY_GATEWAYS: Final = {
    rate_cards.create_first,
    invoices.draft,
    installation.accept_secret,
    canaries.revert,
}
OF_ACCOUNTS = (
    *accounts.TENANTS,
    *accounts.KEYS,
    *accounts.LIMITS,
    *accounts.BILLING,
    *accounts.WEBHOOKS,
    *accounts.USAGE,
    *accounts.RECORDINGS,
)
ALL = (*OF_ACCOUNTS, *of_invoices.ALL, *of_adapters.ALL, *of_evaluations.ALL, *of_people.ALL)


@pytest.fixture
async def world(
    database_url: str, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[World]:
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("REDIS_URL", valkey_url)
    monkeypatch.setenv("LORAPLEX_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("LORAPLEX_PUBLIC_URL", "https://llm.example.com")
    (tmp_path / JOURNAL_FOLDER).mkdir()
    async with open_world(database_url, valkey_url, tmp_path) as opened:
        # A server runs on this data directory: commands leave the files of deleted versions to it.
        with PendingFolders(tmp_path / "adapters").watched():
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
    after = world.dump()
    assert tuple(entry["action"] for entry in entries_since(before, after)) == use_case.entries
    await assert_published(world, before)
    return before, after


@pytest.mark.parametrize("use_case", ALL, ids=lambda each: each.name)
async def test_http_and_command_leave_the_same(world: World, use_case: UseCase) -> None:
    left = []
    if use_case.http is not None and use_case.refused_http is not None:
        before, by_http = await walk(world, use_case, use_case.http, use_case.refused_http)
        keys = {world.admin_key.split("_")[2]: "key", world.operator_key.split("_")[2]: "operator"}
        for entry in entries_since(before, by_http):
            kind, name, has_request = author_of(entry)
            assert keys[name] == kind and has_request
        left.append(by_http)
    if use_case.command is not None and use_case.refused_command is not None:
        before, by_command = await walk(world, use_case, use_case.command, use_case.refused_command)
        assert {author_of(entry) for entry in entries_since(before, by_command)} == {command_author()}
        left.append(by_command)
    assert left
    for after in left:
        assert comparable(after) == comparable(left[0])


async def test_a_deletion_that_cannot_look_for_a_server_deletes_nothing(world: World, tmp_path: Path) -> None:
    await world.begin()
    assert (await world.tenant("POST", "/adapters", {"name": "voice"})).accepted
    lock = tmp_path / "adapters" / PENDING_FOLDER / GATEWAYS_LOCK
    lock.unlink()
    lock.symlink_to(tmp_path)
    before = world.dump()
    refused = await world.command("adapter", "delete", "voice", "--tenant", "harbor")
    assert not refused.accepted and "cannot be read" in refused.detail
    assert world.dump() == before


async def assert_published(world: World, before: Dump) -> None:
    """Every gateway was notified of the tenants whose policy has changed."""
    known = {row["id"]: row["policy_epoch"] for row in before["tenants"]}
    epochs = await world.published()
    for row in world.dump()["tenants"]:
        present, newest = epochs[row["name"]]
        if present != known.get(row["id"]):
            assert newest == present, row["name"]


def test_every_use_case_is_walked() -> None:
    """A use case is a public coroutine function with an author: an `Actor`, or a unit of work, which has one. Those that
    register a version are methods of a server's uploads and pushes, which share `register_folder`: see `test_push_ways.py`.
    """
    found = set()
    packages = (adapters, auth, tenants)
    for module in chain.from_iterable(walk_packages(each.__path__, f"{each.__name__}.") for each in packages):
        members = vars(import_module(module.name))
        for name, each in members.items():
            if iscoroutinefunction(each) and not name.startswith("_"):
                types = each.__annotations__.values()
                found |= {each} if any(kind in (UnitOfWork, Actor) for kind in types) else set()
    apart = {register_folder, author_behind} | RUN_BY_GATEWAYS | of_people.BY_PEOPLE
    assert found == {use_case.function for use_case in ALL} | apart
