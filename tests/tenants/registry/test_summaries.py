"""Adapters at a glance: where production leads, the newest version, and what needs attention."""

from typing import Any
from uuid import UUID

from tests.tenants.registry_records import AliasWriter, RegistryWriter, make_tenant

from loraplex.tenants.database import Database
from loraplex.tenants.models import AdapterVersion
from loraplex.tenants.registry.summaries import registered_digest, served_adapters, troubled_versions

CHECKS = {"checks": [{"name": "ranks", "passed": True}, {"name": "shapes", "passed": False}]}


async def registered(database: Database, tenant_id: UUID, name: str, *states: str) -> UUID:
    """An adapter with a version in each of these states; rejected ones failed the check `shapes`."""
    async with database.as_tenant(tenant_id) as session:
        adapter = await RegistryWriter(session, tenant_id).get_or_create(name)
        for number, state in enumerate(states, start=1):
            judged: dict[str, Any] = {"digest": str(number) * 64, "rank": 8, "config": {}}
            session.add(
                AdapterVersion(
                    tenant_id=tenant_id,
                    adapter_id=adapter.id,
                    version=number,
                    state=state,
                    size_bytes=1,
                    report=CHECKS,
                    **({} if state == "rejected" else judged),
                )
            )
        return adapter.id


async def test_summaries_name_the_wanted_first(database: Database) -> None:
    tenant_id, other = await make_tenant(database), await make_tenant(database, "other")
    ids = [await registered(database, tenant_id, name, *(["ready"] * 2)) for name in ("a", "b", "c")]
    await registered(database, tenant_id, "empty")
    async with database.as_tenant(tenant_id) as session:
        await AliasWriter(session, tenant_id).set("b", "production", {1: 90, 2: 10})
        await AliasWriter(session, tenant_id).set("b", "production", {1: 40, 2: 60})
        await AliasWriter(session, tenant_id).set("b", "canary", {2: 100})
        found, count = await served_adapters(session, tenant_id, [ids[1], ids[0]], 3)
        assert await registered_digest(session, ids[0], 2) == "2" * 64
        assert await registered_digest(session, ids[0], 9) is None
    assert [each.name for each in found] == ["b", "a", "empty"] and count == 4
    assert found[0].production == {1: 40, 2: 60} and found[1].production == {}
    assert [(each.newest, each.newest_state) for each in found] == [(2, "ready"), (2, "ready"), (None, None)]
    async with database.as_tenant(other) as session:
        assert await served_adapters(session, tenant_id, ids, 3) == ([], 0)


async def test_quarantined_and_newest_rejected_versions_need_attention(database: Database) -> None:
    tenant_id = await make_tenant(database)
    await registered(database, tenant_id, "mended", "rejected", "ready")
    await registered(database, tenant_id, "refused", "ready", "rejected")
    await registered(database, tenant_id, "faulty", "quarantined", "ready")
    async with database.as_tenant(tenant_id) as session:
        await AliasWriter(session, tenant_id).set("refused", "production", {1: 100})
        found = await troubled_versions(session, tenant_id, 5)
    assert [(each.adapter, each.version, each.state) for each in found] == [
        ("faulty", 1, "quarantined"),
        ("refused", 2, "rejected"),
    ]
    assert found[1].production == {1: 100} and found[1].failed_check == "shapes"
