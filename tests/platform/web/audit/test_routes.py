"""The audit log over HTTP: pages that later entries do not shift, and no address of an operator."""

from tests.platform.web.managed_tenant import ManagedTenant

from loraplex.tenants.actors import Actor
from loraplex.tenants.audit_log import AuditRepository


async def test_pages_and_filters(tenant: ManagedTenant) -> None:
    for number in range(5):
        await tenant.http.post("adapters", json={"name": f"a-{number}"})
    first = (await tenant.http.get("audit?limit=2&action=adapter.create")).json()
    await tenant.http.post("adapters", json={"name": "later"})
    await tenant.http.delete("adapters/a-0")
    rest = (await tenant.http.get(f"audit?cursor={first['next_cursor']}")).json()
    targets = [entry["target"] for entry in first["data"] + rest["data"]]
    assert targets == [f"adapters/a-{number}" for number in (4, 3, 2, 1, 0)] and rest["next_cursor"] is None
    (found,) = (await tenant.http.get("audit?target=adapters/later")).json()["data"]
    assert "tenant_id" not in found
    assert (found["actor_kind"], found["address"], found["after"]["name"]) == ("key", "127.0.0.1", "later")
    other = await tenant.http.get(f"audit?action=adapter.delete&cursor={first['next_cursor']}")
    assert (other.status_code, other.json()["error"]["param"]) == (400, "action")


async def test_an_operators_address_is_null(tenant: ManagedTenant) -> None:
    async with tenant.database.as_operator() as session:
        audit = AuditRepository(session, Actor("operator", "op-key", "198.51.100.7", "r"), None)
        await audit.record("tenant.suspend", "tenants/writer", tenant_id=tenant.id)
        await audit.record("tenant.suspend", "tenants/rival")
    (entry,) = (await tenant.http.get("audit?actor=op-key")).json()["data"]
    assert (entry["actor_kind"], entry["target"], entry["address"]) == ("operator", "tenants/writer", None)
