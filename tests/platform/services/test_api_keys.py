"""Use cases on keys: entries show a key as responses do, without its secret; a manager's rights bound what it grants."""

from datetime import UTC, datetime

import pytest
from tests.tenants.registry_records import make_tenant

from loraplex.platform.services import api_keys
from loraplex.platform.services.api_keys import OperatorKeys, delegated_keys, snapshot
from loraplex.platform.web.keys.documents import to_response
from loraplex.tenants.actors import command_actor, key_actor
from loraplex.tenants.api_keys.keys import KeyChange, KeyRepository
from loraplex.tenants.audit_queries import audit_entries
from loraplex.tenants.database import Database
from loraplex.tenants.errors import ScopeNotHeld
from loraplex.tenants.unit_of_work import unit_of_work

BOUNDS = KeyChange(expires_at=datetime(2100, 1, 1, tzinfo=UTC), allowed_cidrs=["10.0.0.0/8"])


async def test_the_audit_log_shows_a_key_as_responses_do(database: Database) -> None:
    tenant_id = await make_tenant(database)
    async with unit_of_work(database, command_actor(), None, None) as uow:
        keys = OperatorKeys(uow, tenant_id, "test")
        issued = await api_keys.create(uow, keys, "ci", ["inference"], BOUNDS)
        renewed = await api_keys.rotate(uow, keys, issued.record.key_id, 60)
        for record in (issued.record, renewed.record):
            # Where a key stands among others is not its own change.
            derived = {"last_used_at", "parent_id", "limit_root"}
            shown = to_response(record).model_dump(mode="json", exclude=derived)
            assert snapshot(record) == shown and record.created_by == "command"
        written = await audit_entries(uow.session, tenant_id, {}, None, 9)
    assert [entry.action for entry in reversed(written)] == ["key.create", "key.rotate", "key.create"]
    assert all(issued.plaintext not in str(entry.after) for entry in written)


async def test_a_manager_grants_no_more_than_it_has(database: Database) -> None:
    tenant_id = await make_tenant(database)
    async with database.as_operator() as session:
        repository = KeyRepository(session)
        manager = (await repository.create(tenant_id, "manager", ["keys:write", "inference"])).record
        admin = (await repository.create(tenant_id, "admin", ["tenant:admin"])).record
    actor = key_actor(manager.key_id, None, None)
    async with unit_of_work(database, actor, tenant_id, None) as uow:
        keys = delegated_keys(uow, tenant_id, manager.id)
        issued = await api_keys.create(uow, keys, "child", ["inference"])
        assert issued.record.created_by == manager.key_id
        for refused in (
            api_keys.create(uow, keys, "child", ["usage:read"]),
            api_keys.change(uow, keys, issued.record.key_id, KeyChange(scopes=["usage:read"])),
            api_keys.rotate(uow, keys, admin.key_id, 0),
            api_keys.revoke(uow, keys, admin.key_id),
        ):
            with pytest.raises(ScopeNotHeld):
                await refused
        written = await audit_entries(uow.session, tenant_id, {}, None, 9)
    assert [entry.action for entry in written] == ["key.create"]
