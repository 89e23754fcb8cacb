"""Use cases on tenants: each change has one entry with its before and after; no change has none."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

import pytest

from loraplex.tenants.accounts.records import NewTenantDocument, TierChange
from loraplex.tenants.actors import Actor
from loraplex.tenants.administration import tenants
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.audit_queries import audit_entries
from loraplex.tenants.audit_records import OperatorAuditDocument
from loraplex.tenants.database import Database
from loraplex.tenants.errors import InvalidField, NameTaken, RevisionMoved, TenantNotFound
from loraplex.tenants.unit_of_work import unit_of_work

OPERATOR = Actor("operator", "op-key")


async def create(database: Database, name: str = "harbor", **limits: int) -> NewTenantDocument:
    async with unit_of_work(database, OPERATOR, None, None) as uow:
        return await tenants.create(uow, name, tier="gold", weight=2.0, limits=limits)


async def entries(database: Database, tenant_id: UUID) -> Sequence[OperatorAuditDocument]:
    """The tenant's entries, oldest first."""
    async with database.as_operator() as session:
        return [*reversed(await audit_entries(session, tenant_id, {}, None, 100))]


async def test_a_tenant_is_created_with_a_key_and_limits(database: Database) -> None:
    created = await create(database, tokens_per_day=5)
    async with database.as_operator() as session:
        (key,) = await KeyRepository(session).list(created.id)
    assert key.scopes == ["tenant:admin"] and key.name == "admin" and key.key_id in created.api_key
    made, limited = await entries(database, created.id)
    target = f"tenants/{created.id}"
    assert (made.action, made.target, made.before) == ("tenant.create", target, None)
    assert made.after == {
        "id": str(created.id),
        "name": "harbor",
        "tier": "gold",
        "weight": 2.0,
        "unknown_parameters": "default",
        "created_at": created.created_at.isoformat(),
        "suspended_at": None,
        "deleted_at": None,
        "erased_at": None,
        "key_id": key.key_id,
    }
    assert (limited.action, limited.target) == ("quotas.change", f"{target}/quotas")
    assert (limited.before, limited.after) == ({"tokens_per_day": None}, {"tokens_per_day": 5})


async def test_suspend_and_resume(database: Database) -> None:
    tenant_id = (await create(database)).id
    async with unit_of_work(database, OPERATOR, None, None) as uow:
        first = (await tenants.suspend(uow, tenant_id)).suspended_at
        assert first is not None
        assert (await tenants.suspend(uow, tenant_id)).suspended_at == first
        assert (await tenants.resume(uow, tenant_id)).suspended_at is None
        with pytest.raises(TenantNotFound):
            await tenants.suspend(uow, uuid4())


async def test_every_change_has_one_entry_and_no_change_has_none(database: Database) -> None:
    tenant_id = (await create(database)).id
    changes: tuple[tuple[Any, ...], ...] = (
        (tenants.suspend,),
        (tenants.resume,),
        (tenants.change_tier, TierChange(tier="silver")),
        (tenants.delete,),
    )
    for change, *arguments in changes:
        for _ in range(2):
            async with unit_of_work(database, OPERATOR, None, None) as uow:
                await change(uow, tenant_id, *arguments)
    written = (await entries(database, tenant_id))[1:]
    assert [entry.action for entry in written] == [
        *("tenant.suspend", "tenant.resume", "tenant.change_tier", "tenant.delete")
    ]
    assert [sorted(entry.after or {}) for entry in written] == [
        ["end_running", "suspended_at"],
        ["suspended_at"],
        ["tier"],
        ["deleted_at", "end_running", "suspended_at"],
    ]
    assert (written[2].before, written[2].after) == ({"tier": "gold"}, {"tier": "silver"})


async def test_a_refused_use_case_leaves_nothing(database: Database) -> None:
    created = await create(database)
    before = len(await entries(database, created.id))
    refusals: tuple[tuple[type[Exception], Any], ...] = (
        (NameTaken, lambda uow: tenants.create(uow, "harbor")),
        (InvalidField, lambda uow: tenants.create(uow, "other", limits={"max_keys": -1})),
        (TenantNotFound, lambda uow: tenants.suspend(uow, uuid4())),
        (RevisionMoved, lambda uow: tenants.change_tier(uow, created.id, TierChange("x"), seen=9)),
        (InvalidField, lambda uow: tenants.change_tier(uow, created.id, TierChange(weight=0.0))),
    )
    for error, refused in refusals:
        with pytest.raises(error):
            async with unit_of_work(database, OPERATOR, None, None) as uow:
                await refused(uow)
    assert len(await entries(database, created.id)) == before
    await create(database, "other")
