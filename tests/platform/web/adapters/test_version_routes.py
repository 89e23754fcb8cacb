"""Versions over HTTP: their reports, their profile until the first alias, their deletion; scopes, walls and bounds."""

from types import SimpleNamespace
from typing import Any

import httpx
from tests.platform.web.managed_tenant import ManagedTenant
from tests.tenants.registry_records import RegistryWriter, digest

from loraplex.platform.auth.authenticator import Authenticator
from loraplex.platform.inference.dependencies import ServingConfig
from loraplex.platform.inference.model_resolution import KnownModels
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.database import Database

DIGEST = "a" * 64
PATH = "/tenant/v1/adapters/pirate/versions/1"


async def upload(database: Database, tenant: str, name: str = "pirate") -> None:
    """A version without an alias."""
    async with database.as_operator() as session:
        owner = await TenantRepository(session).get(tenant)
        adapters = RegistryWriter(session, owner.id)
        await adapters.get_or_create(name)
        await adapters.add_version(name, digest=DIGEST, size_bytes=1, rank=8, config={}, report={})


async def patch(gateway: Any, path: str, body: object, key: str, etag: int = 1) -> httpx.Response:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        headers = {"authorization": f"Bearer {key}", "if-match": f'"{etag}"'}
        return await client.patch(path, headers=headers, **content)


async def test_a_profile_over_http_until_the_first_alias(start_gateway: Any, database: Database) -> None:
    gateway = await start_gateway()
    key = await gateway.tenant("writer", ("adapters:write", "inference"))
    await upload(database, "writer")
    markers = {"start": "<plan>", "end": "</plan>"}
    profile = {"tool_style": "hermes", "reasoning_style": markers, "defaults": {"temperature": 0}}
    response = await patch(gateway, PATH, profile, key)
    assert response.status_code == 200
    document = response.json()
    assert (document["name"], document["version"], document["digest"]) == ("pirate", 1, DIGEST)
    assert (document["tool_style"], document["defaults"]) == ("hermes", {"temperature": 0})
    assert document["reasoning_style"] == markers
    assert response.headers["etag"] == '"2"'
    assert (await patch(gateway, PATH, {"defaults": {}}, key)).status_code == 412
    assert (await patch(gateway, PATH, {"defaults": None}, key, 2)).json()["tool_style"] == "hermes"
    assert (await patch(gateway, PATH, {}, key, 3)).json()["defaults"] == {}
    await gateway.adapter("writer", "pirate", DIGEST)
    assert (await patch(gateway, PATH, {"tool_style": "mistral"}, key, 3)).status_code == 412
    async with database.as_operator() as session:
        owner = await TenantRepository(session).get("writer")
        revision = (await RegistryWriter(session, owner.id).version("pirate", 1)).revision
    late = await patch(gateway, PATH, {"reasoning_style": None}, key, revision)
    assert (late.status_code, late.json()["error"]["code"]) == (409, "conflict")
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        unseen = await client.patch(PATH, headers={"authorization": f"Bearer {key}"}, json={})
    assert (unseen.status_code, unseen.json()["error"]["code"]) == (428, "precondition_required")


async def test_the_profile_reaches_the_request(start_gateway: Any, database: Database) -> None:
    gateway = await start_gateway()
    key = await gateway.tenant("writer", ("tenant:admin",))
    await upload(database, "writer")
    defaults = {"top_k": 7, "thinking_token_budget": 64, "reasoning_effort": "low"}
    profile = {"tool_style": "llama3", "reasoning_style": "think", "defaults": defaults}
    await patch(gateway, PATH, profile, key)
    dependencies: Any = SimpleNamespace(served_model_name="base", database=database, config=ServingConfig())
    models = KnownModels(dependencies)
    caller = await Authenticator(database, 0).authenticate([f"Bearer {key}"])
    model = await models.read(caller, "pirate@1")
    assert (model.tool_style, model.reasoning_style, model.defaults) == ("llama3", "think", defaults)
    base = await models.read(caller, "base")
    assert (base.tool_style, base.reasoning_style, base.defaults) == (None, None, {})


async def test_resources_of_another_tenant_do_not_exist(start_gateway: Any, database: Database) -> None:
    gateway = await start_gateway()
    rival = await gateway.tenant("rival", ("tenant:admin",))
    await upload(database, "acme")
    messages = set()
    for name in ("pirate", "nobody", "a%00", "ö"):
        path = f"/tenant/v1/adapters/{name}/versions/1"
        response = await patch(gateway, path, {"tool_style": "hermes"}, rival)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found"), name
        messages.add(response.json()["error"]["message"].split("named")[0])
    assert messages == {"no adapter "}


async def test_versions_that_do_not_exist(tenant: ManagedTenant) -> None:
    await tenant.version(1)
    for version in ("0", "2", "01", "-1", "one", "1.0", "9" * 10, "9" * 60):
        for method, body in (("GET", None), ("PATCH", {}), ("DELETE", None)):
            path, seen = f"adapters/pirate/versions/{version}", {"if-match": '"1"'}
            response = await tenant.http.request(method, path, json=body, headers=seen)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found"), version


async def test_bad_bodies(tenant: ManagedTenant) -> None:
    await tenant.version(1)
    cases: list[tuple[object, str, str | None]] = [
        ({"template": "{{ x }}"}, "unknown_parameter", "template"),
        ({"defaults": {"seed": 1}}, "unknown_parameter", "defaults.seed"),
        ({"defaults": {"temperature": 3}}, "invalid_value", "defaults.temperature"),
        ({"tool_style": "jinja"}, "invalid_value", "tool_style"),
        ({"reasoning_style": {"start": "<a>", "end": "<a>"}}, "invalid_value", "reasoning_style"),
        (b"[]", "invalid_json", None),
    ]
    for body, code, param in cases:
        error = (await patch(tenant.gateway, PATH, body, tenant.key)).json()["error"]
        assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error")


async def test_it_needs_its_scope(start_gateway: Any, database: Database) -> None:
    gateway = await start_gateway()
    await upload(database, "acme")
    for scopes in (("inference",), ("adapters:read", "keys:write")):
        key = await gateway.tenant("-".join(scopes).replace(":", "-"), scopes)
        assert (await patch(gateway, PATH, b"not even JSON", key)).json()["error"][
            "code"
        ] == "insufficient_scope"
    assert (await patch(gateway, PATH, {}, "lpx_live_x")).status_code == 401


async def test_versions_are_listed_newest_first_with_their_reports(tenant: ManagedTenant) -> None:
    for number in range(1, 6):
        await tenant.version(number)
    seen, query = [], "limit=2"
    while query:
        listing = (await tenant.http.get(f"adapters/pirate/versions?{query}")).json()
        seen += [version["version"] for version in listing["data"]]
        query = f"limit=2&cursor={listing['next_cursor']}" if listing["next_cursor"] else ""
    assert seen == [5, 4, 3, 2, 1]
    response = await tenant.http.get("adapters/pirate/versions/3")
    document = response.json()
    assert response.headers["etag"] == f'"{document["revision"]}"'
    assert (document["state"], document["digest"], document["config"]) == ("ready", digest(3), {"r": 8})
    assert document["report"] == {
        "checks": [{"name": "finite", "passed": True, "detail": "every value is finite", "warning": False}],
        "system_fingerprint": "fp_0123456789abcdef",
    }


async def test_a_version_in_use_is_not_deleted(tenant: ManagedTenant) -> None:
    for number in (1, 2):
        await tenant.version(number)
    await tenant.put(
        "production", {"split": [{"version": 1, "weight": 99}, {"version": 2, "weight": 1}]}, None
    )
    await tenant.put("canary", {"version": 2}, None)
    refused = await tenant.http.delete("adapters/pirate/versions/2")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "in_use")
    assert "canary, production" in refused.json()["error"]["message"]
    await tenant.put("production", {"version": 1}, 1)
    await tenant.http.delete("adapters/pirate/aliases/canary")
    await tenant.reserve(2)
    running = await tenant.http.delete("adapters/pirate/versions/2")
    assert running.status_code == 409 and "1 requests run" in running.json()["error"]["message"]
    await tenant.settle()
    stale = await tenant.http.delete("adapters/pirate/versions/2", headers={"if-match": '"99"'})
    assert stale.status_code == 412
    for _ in range(2):
        assert (await tenant.http.delete("adapters/pirate/versions/2")).status_code == 204
    assert (await tenant.http.get("adapters/pirate/versions/2")).json()["state"] == "deleting"
    again = await tenant.http.post("adapters/pirate/aliases/production/rollback")
    assert again.status_code == 409 and "deleting" in again.json()["error"]["message"]
    assert [action for action, _ in await tenant.actions()].count("version.delete") == 1
    assert await tenant.version(3) == 3


async def test_a_version_that_is_being_validated_is_not_deleted(tenant: ManagedTenant) -> None:
    await tenant.version(1, state="validating")
    for path in ("adapters/pirate/versions/1", "adapters/pirate"):
        refused = await tenant.http.delete(path)
        assert refused.status_code == 409 and "validated" in refused.json()["error"]["message"]


async def test_a_deprecated_version_serves_no_request_until_it_is_restored(tenant: ManagedTenant) -> None:
    for number in (1, 2):
        await tenant.version(number)
    await tenant.put("production", {"version": 1}, None)
    aliased = await tenant.http.post("adapters/pirate/versions/1/deprecate")
    assert (aliased.status_code, aliased.json()["error"]["code"]) == (409, "in_use")
    assert "production" in aliased.json()["error"]["message"]
    stale = await tenant.http.post("adapters/pirate/versions/2/deprecate", headers={"if-match": '"99"'})
    assert stale.status_code == 412
    deprecated = await tenant.http.post("adapters/pirate/versions/2/deprecate")
    assert (deprecated.status_code, deprecated.json()["state"]) == (200, "deprecated")
    assert (await tenant.http.post("adapters/pirate/versions/2/deprecate")).status_code == 409
    assert (await tenant.put("production", {"version": 2}, 1)).status_code == 409
    restored = await tenant.http.post("adapters/pirate/versions/2/restore")
    assert (restored.status_code, restored.json()["state"]) == (200, "ready")
    assert (await tenant.http.post("adapters/pirate/versions/2/restore")).status_code == 409
    actions = [action for action, _ in await tenant.actions()]
    assert (actions.count("version.deprecate"), actions.count("version.restore")) == (1, 1)
