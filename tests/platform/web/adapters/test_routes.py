"""Adapters over HTTP: create, describe, list, delete; each change is audited, each race has one winner."""

import asyncio
from typing import Any

from structlog.testing import capture_logs
from tests.platform.web.managed_tenant import ManagedTenant, managed

from loraplex.platform.server.resources import warn_of_shadowed_adapters
from loraplex.tenants.database import Database
from loraplex.tenants.default_limits import DefaultLimits


async def test_the_lifecycle_of_an_adapter(tenant: ManagedTenant) -> None:
    made = await tenant.http.post("adapters", json={"name": "pirate", "description": "Talks like one."})
    assert (made.status_code, made.headers["location"]) == (201, "/tenant/v1/adapters/pirate")
    assert (await tenant.http.post("adapters", json={"name": "pirate"})).status_code == 409
    read = await tenant.http.get("adapters/pirate")
    assert read.json() == made.json() and read.headers["etag"] == made.headers["etag"] == '"1"'
    assert read.json()["created_at"].endswith("Z")
    for headers, status in (({}, 428), ({"if-match": "1"}, 400), ({"if-match": '"7"'}, 412)):
        response = await tenant.http.patch("adapters/pirate", json={"description": ""}, headers=headers)
        assert response.status_code == status
    changed = await tenant.http.patch(
        "adapters/pirate", json={"description": "Arr."}, headers={"if-match": '"1"'}
    )
    assert (changed.json()["description"], changed.headers["etag"]) == ("Arr.", '"2"')
    assert (await tenant.http.delete("adapters/pirate", headers={"if-match": '"1"'})).status_code == 412
    assert (await tenant.http.delete("adapters/pirate")).status_code == 204
    assert (await tenant.http.get("adapters/pirate")).status_code == 404
    assert await tenant.actions() == [
        ("adapter.create", "adapters/pirate"),
        ("adapter.change", "adapters/pirate"),
        ("adapter.delete", "adapters/pirate"),
    ]
    change = (await tenant.http.get("audit?action=adapter.change")).json()["data"][0]
    assert (change["before"], change["after"]) == (
        {"description": "Talks like one."},
        {"description": "Arr."},
    )
    assert change["actor"] in tenant.key and change["request_id"] == changed.headers["x-request-id"]
    assert (await tenant.http.post("adapters", json={"name": "pirate"})).status_code == 201


async def test_a_repeated_creation_says_again_where_the_adapter_is(tenant: ManagedTenant) -> None:
    first, again = [
        await tenant.http.post("adapters", json={"name": "pirate"}, headers={"idempotency-key": "k"})
        for _ in range(2)
    ]
    assert again.headers["idempotency-replayed"] == "true"
    assert (again.status_code, again.content) == (201, first.content)
    for header in ("location", "etag"):
        assert again.headers[header] == first.headers[header]
    assert await tenant.actions() == [("adapter.create", "adapters/pirate")]


async def test_bodies_and_names(tenant: ManagedTenant) -> None:
    for body, code, param in (
        ({}, "missing_required_parameter", "name"),
        ({"name": "A"}, "invalid_value", "name"),
        ({"name": "a", "description": "x" * 1001}, "invalid_value", "description"),
        ({"name": "a", "description": "\0"}, "invalid_value", "description"),
        ({"name": "a", "owner": "b"}, "unknown_parameter", "owner"),
    ):
        response = await tenant.http.post("adapters", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, code, param)
    for name in ("nobody", "a%00", "ö"):
        assert (await tenant.http.get(f"adapters/{name}")).status_code == 404
    assert await tenant.actions() == []


async def test_no_adapter_has_the_name_of_the_base_model(start_gateway: Any, database: Database) -> None:
    async with managed(await start_gateway(served_model_name="tiny"), "writer") as tenant:
        refused = await tenant.http.post("adapters", json={"name": "tiny"})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "invalid_value", "name")
        assert "base model" in error["message"]
        assert (await tenant.http.post("adapters", json={"name": "tiny-2"})).status_code == 201
        assert await tenant.actions() == [("adapter.create", "adapters/tiny-2")]
    for name, warned in (("tiny", []), ("tiny-2", [["writer"]])):
        with capture_logs() as logs:
            await warn_of_shadowed_adapters(database, name)
        assert [entry["tenants"] for entry in logs] == warned


async def test_the_listing_is_stable_under_insertions_and_deletions(tenant: ManagedTenant) -> None:
    for number in range(7):
        await tenant.http.post("adapters", json={"name": f"b-{number}"})
    first = (await tenant.http.get("adapters?limit=3")).json()
    for name in ("a-new", "b-2-new"):
        await tenant.http.post("adapters", json={"name": name})
    await tenant.http.delete("adapters/b-2")
    rest = (await tenant.http.get(f"adapters?limit=100&cursor={first['next_cursor']}")).json()
    names = [adapter["name"] for adapter in first["data"] + rest["data"]]
    assert names == ["b-0", "b-1", "b-2", "b-2-new", "b-3", "b-4", "b-5", "b-6"]
    for path in ("adapters/b-0/versions", "audit"):
        foreign = await tenant.http.get(f"{path}?cursor={first['next_cursor']}")
        assert (foreign.status_code, foreign.json()["error"]["param"]) == (400, "cursor")


async def test_an_adapter_in_use_is_not_deleted(tenant: ManagedTenant) -> None:
    await tenant.version(1)
    await tenant.put("production", {"version": 1}, None)
    refused = await tenant.http.delete("adapters/pirate")
    assert refused.status_code == 409 and "production" in refused.json()["error"]["message"]
    await tenant.http.delete("adapters/pirate/aliases/production")
    await tenant.reserve(1)
    assert (await tenant.http.delete("adapters/pirate")).status_code == 409
    await tenant.settle()
    assert (await tenant.http.delete("adapters/pirate")).status_code == 204


async def test_adapters_have_a_default_limit(start_gateway: Any, database: Database) -> None:
    limited = Database(database.url, limits=DefaultLimits(max_adapters=1))
    async with managed(await start_gateway(other=limited), "writer") as tenant:
        assert (await tenant.http.post("adapters", json={"name": "first"})).status_code == 201
        refused = await tenant.http.post("adapters", json={"name": "second"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "limit_reached")
    await limited.close()


async def test_max_adapters_is_enforced_under_a_race(tenant: ManagedTenant) -> None:
    await tenant.limit(max_adapters=3)
    responses = await asyncio.gather(
        *(tenant.http.post("adapters", json={"name": f"a-{number}"}) for number in range(8))
    )
    assert sorted(response.status_code for response in responses) == [201] * 3 + [409] * 5
    error = next(response for response in responses if response.status_code == 409).json()["error"]
    assert error["code"] == "limit_reached" and "max_adapters" in error["message"]
    name = next(response for response in responses if response.status_code == 201).json()["name"]
    await tenant.http.delete(f"adapters/{name}")
    assert (await tenant.http.post("adapters", json={"name": "room"})).status_code == 201


async def test_a_repeated_post_creates_one_adapter(tenant: ManagedTenant) -> None:
    async def post(name: str = "pirate") -> Any:
        return await tenant.http.post("adapters", json={"name": name}, headers={"idempotency-key": "k"})

    first = await post()
    assert (await post()).json() == first.json()
    other = await post("sailor")
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_mismatch")
    assert len(await tenant.actions()) == 1


async def test_one_of_two_concurrent_changes_wins(tenant: ManagedTenant) -> None:
    await tenant.http.post("adapters", json={"name": "pirate"})
    responses = await asyncio.gather(
        *(
            tenant.http.patch("adapters/pirate", json={"description": text}, headers={"if-match": '"1"'})
            for text in ("one", "two")
        )
    )
    assert sorted(response.status_code for response in responses) == [200, 412]


async def test_resources_of_another_tenant_do_not_exist(start_gateway: Any) -> None:
    gateway = await start_gateway()
    async with managed(gateway, "owner") as owner, managed(gateway, "rival") as rival:
        await owner.version(1)
        await owner.put("production", {"version": 1}, None)
        seen = {"if-match": '"1"'}
        for method, path, body in (
            ("GET", "adapters/pirate", None),
            ("PATCH", "adapters/pirate", {"description": ""}),
            ("DELETE", "adapters/pirate", None),
            ("GET", "adapters/pirate/versions", None),
            ("GET", "adapters/pirate/versions/1", None),
            ("PATCH", "adapters/pirate/versions/1", {}),
            ("DELETE", "adapters/pirate/versions/1", None),
            ("GET", "adapters/pirate/aliases", None),
            ("GET", "adapters/pirate/aliases/production", None),
            ("PUT", "adapters/pirate/aliases/production", {"version": 1}),
            ("POST", "adapters/pirate/aliases/production/rollback", None),
            ("DELETE", "adapters/pirate/aliases/production", None),
        ):
            responses = [
                await rival.http.request(method, each, json=body, headers=seen)
                for each in (path, path.replace("pirate", "nobody"))
            ]
            assert [response.status_code for response in responses] == [404, 404], (method, path)
            assert responses[0].text.replace("pirate", "nobody") == responses[1].text
        assert (await rival.http.get("adapters")).json()["data"] == [] == await rival.actions()
        assert (await owner.http.get("adapters/pirate/versions/1")).json()["state"] == "ready"


async def test_scopes(start_gateway: Any) -> None:
    gateway = await start_gateway()
    for scope, read, written in (
        ("adapters:read", 200, 403),
        ("adapters:write", 403, 201),
        ("inference", 403, 403),
    ):
        key = await gateway.tenant(scope.replace(":", "-"), (scope,))
        headers = {"authorization": f"Bearer {key}"}
        listed = await gateway.get("/tenant/v1/adapters", [*headers.items()])
        made = await gateway.post("/tenant/v1/adapters", {"name": "a"}, **headers)
        assert (listed.status_code, made.status_code) == (read, written)
