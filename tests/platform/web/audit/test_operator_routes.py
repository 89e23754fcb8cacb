"""`GET /operator/v1/audit` over HTTP: entries of all tenants, newest first, with filters."""

from typing import Any
from uuid import uuid4


async def test_entries_of_all_tenants_by_pages_and_filters(operator: Any) -> None:
    paths = [(await operator.tenant(name))[0] for name in ("harbor", "island", "jetty")]
    await operator.post(f"{paths[0]}/suspend")
    first = (await operator.get("/audit?limit=3")).json()
    assert [(row["action"], f"/{row['target']}") for row in first["data"]] == [
        ("tenant.suspend", paths[0]),
        ("tenant.create", paths[2]),
        ("tenant.create", paths[1]),
    ]
    rest = (await operator.get(f"/audit?limit=3&cursor={first['next_cursor']}")).json()
    assert [f"/{row['target']}" for row in rest["data"]] == [paths[0]] and rest["next_cursor"] is None
    tenant_id = paths[0].rpartition("/")[2]
    own = (await operator.get(f"/audit?tenant_id={tenant_id}")).json()["data"]
    assert [row["action"] for row in own] == ["tenant.suspend", "tenant.create"]
    assert {row["tenant_id"] for row in own} == {tenant_id}
    assert {row["actor_kind"] for row in own} == {"operator"} and own[0]["address"] == "127.0.0.1"
    assert (await operator.get(f"/audit?tenant_id={uuid4()}")).json()["data"] == []
    wrong = await operator.get("/audit?tenant_id=x")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tenant_id")


async def test_no_entry_contains_a_new_key(operator: Any) -> None:
    _, key = await operator.tenant()
    assert key.split("_")[3] not in (await operator.get("/audit")).text
