"""Use cases on keys: entries show a key as responses do, without its secret; a manager's rights bound what it grants."""

from datetime import UTC, datetime

import pytest
from tests.tenants.registry_records import make_tenant

from loraplex.tenants.actors import Actor, command_actor
from loraplex.tenants.api_keys import use_cases as api_keys
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.api_keys.records import KeyChange, KeyDocument
from loraplex.tenants.api_keys.use_cases import Delegated, Operator
from loraplex.tenants.audit_queries import audit_entries
from loraplex.tenants.database import Database
from loraplex.tenants.errors import ScopeNotHeld
from loraplex.tenants.unit_of_work import unit_of_work

BOUNDS = KeyChange(expires_at=datetime(2100, 1, 1, tzinfo=UTC), allowed_cidrs=["10.0.0.0/8"])


async def test_the_audit_log_shows_a_key_as_responses_do(database: Database) -> None:
    tenant_id = await make_tenant(database)
    async with unit_of_work(database, command_actor(), None, None) as uow:
        operator = Operator(tenant_id, "test")
        issued = await api_keys.create(uow, operator, "ci", ["inference"], BOUNDS)
        renewed = await api_keys.rotate(uow, operator, issued.id, 60)
        ended = await api_keys.revoke(uow, operator, issued.id)
        written = await audit_entries(uow.session, tenant_id, {}, None, 9)
        reread = KeyDocument.of(await KeyRepository(uow.session).get(tenant_id, issued.id))
    assert [entry.action for entry in reversed(written)] == [
        *("key.create", "key.rotate", "key.create", "key.revoke")
    ]
    # Where a key stands among others is not its own change.
    derived = {"last_used_at", "parent_id", "limit_root", "api_key"}
    by_action = {(entry.action, entry.target): entry for entry in written}
    for key in (issued, renewed):
        after = by_action["key.create", f"keys/{key.id}"].after
        assert after is not None and after == key.model_dump(mode="json", exclude=derived)
        assert set(after) == {
            *("id", "name", "environment", "scopes", "allowed_cidrs", "created_by"),
            *("created_at", "expires_at", "revoked_at", "replaced_by"),
        }
        assert key.created_by == "command" and after["created_at"].endswith("Z")
    rotated = by_action["key.rotate", f"keys/{issued.id}"].after
    assert rotated is not None and rotated["replaced_by"] == renewed.id
    # What a change returns is what is read afterwards.
    assert ended == reread and renewed.parent_id == issued.id
    assert all(issued.api_key not in str(entry.after) for entry in written)


async def test_a_manager_grants_no_more_than_it_has(database: Database) -> None:
    tenant_id = await make_tenant(database)
    async with database.as_operator() as session:
        repository = KeyRepository(session)
        manager = (await repository.create(tenant_id, "manager", ["keys:write", "inference"])).record
        admin = (await repository.create(tenant_id, "admin", ["tenant:admin"])).record
    actor = Actor("key", manager.key_id, None, None)
    async with unit_of_work(database, actor, tenant_id, None) as uow:
        right = Delegated(tenant_id, manager.id)
        issued = await api_keys.create(uow, right, "child", ["inference"])
        assert issued.created_by == manager.key_id
        for refused in (
            api_keys.create(uow, right, "child", ["usage:read"]),
            api_keys.change(uow, right, issued.id, KeyChange(scopes=["usage:read"])),
            api_keys.rotate(uow, right, admin.key_id, 0),
            api_keys.revoke(uow, right, admin.key_id),
        ):
            with pytest.raises(ScopeNotHeld):
                await refused
        written = await audit_entries(uow.session, tenant_id, {}, None, 9)
    assert [entry.action for entry in written] == ["key.create"]
