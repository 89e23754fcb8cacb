"""A unit of work commits a change and its audit entries together, then notifies the gateways."""

import os
import pwd
from dataclasses import dataclass, field
from uuid import UUID

import pytest
from sqlalchemy import text
from tests.tenants.registry_records import make_tenant

from loraplex.tenants.actors import Actor, command_actor
from loraplex.tenants.database import Database
from loraplex.tenants.errors import NameTaken, RevisionMoved, ValkeyUnavailable
from loraplex.tenants.unit_of_work import require_revision, unit_of_work

KEY = Actor("key", "abcdefghijkl", "192.0.2.1", "r-1")
ENTRIES = text("SELECT actor_kind, actor, action, tenant_id FROM audit_entries ORDER BY id")


@dataclass
class Publisher:
    """Records the tenants it publishes and whether their entries were committed by then. `down`: it always fails."""

    database: Database
    down: bool = False
    published: list[UUID] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)

    async def publish(self, tenant_id: UUID) -> None:
        async with self.database.as_operator() as session:
            self.committed.append(len((await session.execute(ENTRIES)).all()))
        if self.down:
            raise ValkeyUnavailable("no answer")
        self.published.append(tenant_id)


async def test_gateways_are_notified_after_the_commit(database: Database) -> None:
    tenant_id, publisher = await make_tenant(database), Publisher(database)
    async with unit_of_work(database, KEY, tenant_id, publisher) as uow:
        await uow.audit.record("thing.create", "things/1")
        await uow.audit.record("thing.create", "things/2")
        assert publisher.published == []
    assert (publisher.published, publisher.committed) == ([tenant_id], [2])


async def test_an_error_leaves_nothing_and_notifies_no_gateway(database: Database) -> None:
    tenant_id, publisher = await make_tenant(database), Publisher(database)
    with pytest.raises(NameTaken):
        async with unit_of_work(database, KEY, tenant_id, publisher) as uow:
            await uow.audit.record("thing.create", "things/1")
            raise NameTaken("no")
    async with database.as_operator() as session:
        assert (await session.execute(ENTRIES)).all() == []
    assert publisher.committed == []


@pytest.mark.parametrize("down", [False, True])
async def test_an_operator_changes_several_tenants(database: Database, down: bool) -> None:
    tenants = {await make_tenant(database, name) for name in ("acme", "beta")}
    publisher = Publisher(database, down)
    async with unit_of_work(database, Actor("command", "root"), None, publisher) as uow:
        for tenant_id in tenants:
            await uow.audit.record("thing.create", "things/1", tenant_id=tenant_id)
        await uow.audit.record("thing.create", "things/2")
    assert len(publisher.committed) == 2 and set(publisher.published) == (set() if down else tenants)
    async with database.as_operator() as session:
        entries = (await session.execute(ENTRIES)).all()
    assert {tuple(entry) for entry in entries} == {
        ("command", "root", "thing.create", tenant_id) for tenant_id in (*tenants, None)
    }


async def test_a_tenants_unit_of_work_sees_its_own_rows(database: Database) -> None:
    tenant_id, _ = [await make_tenant(database, name) for name in ("acme", "beta")]
    for role, seen in ((tenant_id, 1), (None, 2)):
        async with unit_of_work(database, KEY, role, None) as uow:
            assert await uow.session.scalar(text("SELECT count(*) FROM tenants")) == seen


def test_a_revision_is_compared_if_one_was_seen() -> None:
    require_revision(None, 4)
    require_revision(3, 3)
    with pytest.raises(RevisionMoved, match="read it again"):
        require_revision(3, 4)


def test_the_actor_of_a_command_is_the_user_who_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command_actor() == Actor("command", pwd.getpwuid(os.getuid()).pw_name)
    nameless: dict[int, object] = {}
    monkeypatch.setattr(pwd, "getpwuid", nameless.__getitem__)
    assert command_actor() == Actor("command", f"uid {os.getuid()}")
