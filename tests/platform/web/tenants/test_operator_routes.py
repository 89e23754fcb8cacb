"""`/operator/v1/tenants` over HTTP: created once, listed in pages; suspension and deletion apply to the next request."""

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID, uuid4

from httpx import Response

from loraplex.tenants.accounts.deletion import TenantDeletions
from loraplex.tenants.database import Database

UNKNOWN = f"/tenants/{uuid4()}"
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "name"),
    ({"name": "Harbor"}, "name"),
    ({"name": "harbor\n"}, "name"),
    ({"name": "harbor", "weight": 0}, "weight"),
    ({"name": "harbor", "weight": "1"}, "weight"),
    ({"name": "harbor", "tier": ""}, "tier"),
    ({"name": "harbor", "color": 1}, "color"),
)


async def test_a_tenant_is_created_with_its_first_key(operator: Any) -> None:
    response = await operator.post("/tenants", {"name": "harbor", "tier": "gold", "weight": 2})
    document = response.json()
    assert response.status_code == 201 and response.headers["etag"] == '"1"'
    assert response.headers["cache-control"] == "no-store"
    assert (document["name"], document["tier"], document["weight"]) == ("harbor", "gold", 2.0)
    key = document.pop("api_key")
    models = await operator.as_tenant("GET", f"{operator.gateway.url}/v1/models", key)
    assert models.status_code == 200
    shown = await operator.get(f"/tenants/{document['id']}")
    assert shown.json() == document and key not in shown.text
    taken = await operator.post("/tenants", {"name": "harbor"})
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "conflict")


async def test_a_repeated_request_creates_one_tenant(operator: Any) -> None:
    body = {"name": "harbor"}
    first = await operator.post("/tenants", body, **{"idempotency-key": "k"})
    again = await operator.post("/tenants", body, **{"idempotency-key": "k"})
    assert (first.status_code, first.content) == (again.status_code, again.content)
    other = await operator.post("/tenants", {"name": "other"}, **{"idempotency-key": "k"})
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_mismatch")


async def test_invalid_fields_of_a_tenant_are_refused_by_name(operator: Any) -> None:
    for body, param in REFUSED:
        response = await operator.post("/tenants", body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), body


async def test_the_listing_continues_after_the_last_name(operator: Any) -> None:
    for name in ("d", "b", "c", "e"):
        await operator.tenant(name)
    first = (await operator.get("/tenants?limit=3")).json()
    # `acme` is the gateway's own.
    assert [row["name"] for row in first["data"]] == ["acme", "b", "c"]
    await operator.tenant("a-newcomer")
    second = (await operator.get(f"/tenants?limit=3&cursor={first['next_cursor']}")).json()
    assert ([row["name"] for row in second["data"]], second["next_cursor"]) == (["d", "e"], None)


async def test_suspended_and_resumed_for_the_next_request(operator: Any) -> None:
    path, key = await operator.tenant()
    models = f"{operator.gateway.url}/v1/models"
    assert (await operator.as_tenant("GET", models, key)).status_code == 200
    suspended = await operator.post(f"{path}/suspend")
    assert suspended.status_code == 200 and suspended.json()["suspended_at"] is not None
    refused = await operator.as_tenant("GET", models, key)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "tenant_suspended")
    again = await operator.post(f"{path}/suspend")
    assert again.json() == suspended.json()
    assert (await operator.post(f"{path}/resume")).json()["suspended_at"] is None
    assert (await operator.as_tenant("GET", models, key)).status_code == 200
    entries = (await operator.get("/audit?action=tenant.suspend")).json()["data"]
    assert len(entries) == 1 and entries[0]["after"].keys() == {"suspended_at", "end_running"}


async def test_what_runs_may_run_on_and_be_ended_later(operator: Any) -> None:
    path, _ = await operator.tenant()
    for body in ({"end_running": None}, {"end_running": "no"}, {"end": True}):
        assert (await operator.post(f"{path}/suspend", body)).status_code == 400
    for end_running in (False, False, True, True):
        assert (await operator.post(f"{path}/suspend", {"end_running": end_running})).status_code == 200
    entries = (await operator.get("/audit?action=tenant.suspend")).json()["data"]
    assert [[*entry["after"]] for entry in entries] == [["end_running"], ["suspended_at"]]
    assert (await operator.post(f"{path}/resume", {"end_running": True})).status_code == 400


async def test_tier_and_weight_change_the_named_revision(operator: Any) -> None:
    path, _ = await operator.tenant()
    changed = await operator.patch(f"{path}/tier", {"tier": "gold"}, '"1"')
    assert (changed.json()["tier"], changed.json()["weight"], changed.headers["etag"]) == ("gold", 1.0, '"2"')
    late = await operator.patch(f"{path}/tier", {"weight": 2}, '"1"')
    assert (late.status_code, late.json()["error"]["code"]) == (412, "precondition_failed")
    assert (await operator.patch(f"{path}/tier", {"weight": 2.5}, '"2"')).json()["weight"] == 2.5
    blind = await operator.client.patch(f"{path}/tier", json={"weight": 2})
    assert blind.status_code == 428
    wrong: tuple[dict[str, object], ...] = ({"unknown_parameters": "ignore"}, {"unknown_parameters": None})
    for body in ({"weight": None}, {"weight": 1001}, {"name": "x"}, *wrong):
        assert (await operator.patch(f"{path}/tier", body, '"3"')).status_code == 400
    for value, revision in (("report", 3), ("refuse", 4), ("default", 5)):
        set_to = await operator.patch(f"{path}/tier", {"unknown_parameters": value}, f'"{revision}"')
        assert set_to.json()["unknown_parameters"] == value


async def test_deleted_for_the_next_request_and_its_name_is_free(operator: Any, database: Database) -> None:
    path, key = await operator.tenant()
    models = f"{operator.gateway.url}/v1/models"
    deleted = await operator.delete(path)
    assert deleted.status_code == 202
    assert deleted.json()["deleted_at"] is not None and deleted.json()["erased_at"] is None
    assert (await operator.as_tenant("GET", models, key)).status_code == 401
    assert (await operator.delete(path)).json() == deleted.json()
    assert (await operator.get(path)).json() == deleted.json()
    for verb in ("suspend", "resume"):
        assert (await operator.post(f"{path}/{verb}")).status_code == 404
    names = [row["name"] for row in (await operator.get("/tenants")).json()["data"]]
    assert names == ["acme"]
    again, _ = await operator.tenant()
    assert again != path
    async with database.as_operator() as session:
        assert [str(each) for each in await TenantDeletions(session).unfinished(9)] == [
            path.rpartition("/")[2]
        ]
    assert len((await operator.get("/audit?action=tenant.delete")).json()["data"]) == 1


async def test_unknown_tenants(operator: Any) -> None:
    for path in (UNKNOWN, "/tenants/x", UNKNOWN.upper().replace("TENANTS", "tenants")):
        responses = [
            await operator.get(path),
            await operator.delete(path),
            await operator.get(f"{path}/quotas"),
        ]
        responses += [await operator.post(f"{path}/{verb}") for verb in ("suspend", "resume")]
        responses += [await operator.patch(f"{path}/{part}", {}, '"1"') for part in ("tier", "quotas")]
        assert {response.status_code for response in responses} == {404}
        assert {response.json()["error"]["code"] for response in responses} == {"not_found"}


async def test_every_gateway_is_notified_of_policy_changes(operator: Any) -> None:
    path, _ = await operator.tenant()
    tenant_id = UUID(path.rpartition("/")[2])
    heard = operator.gateway.admissions.published
    changes: tuple[Callable[[], Awaitable[Response]], ...] = (
        lambda: operator.post(f"{path}/suspend"),
        lambda: operator.post(f"{path}/resume"),
        lambda: operator.patch(f"{path}/tier", {"weight": 2}, '"3"'),
        lambda: operator.patch(f"{path}/quotas", {"tokens_per_day": 5}, '"1"'),
        lambda: operator.delete(path),
    )
    for change in changes:
        heard.clear()
        assert (await change()).status_code < 300
        assert heard == [tenant_id]
