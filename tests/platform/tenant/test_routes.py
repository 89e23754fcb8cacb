"""`PATCH /tenant/v1/adapters/{name}/versions/{v}` on a real database: scopes, walls, bounds, and its end by the first alias."""

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from loraplex.platform.auth import Authenticator
from loraplex.platform.model_names import resolve_model
from loraplex.tenants.accounts import TenantRepository
from loraplex.tenants.adapters import AdapterRepository
from loraplex.tenants.database import Database

DIGEST = "a" * 64
PATH = "/tenant/v1/adapters/pirate/versions/1"


async def upload(database: Database, tenant: str, name: str = "pirate") -> None:
    """A version without an alias."""
    async with database.as_operator() as session:
        owner = await TenantRepository(session).get(tenant)
        adapters = AdapterRepository(session, owner.id)
        await adapters.get_or_create(name)
        await adapters.add_version(name, digest=DIGEST, size_bytes=1, rank=8, config={}, report={})


async def patch(gateway: Any, path: str, body: object, key: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return await client.patch(path, headers={"authorization": f"Bearer {key}"}, **content)


async def test_a_profile_over_http_until_the_first_alias(start_gateway: Any, database: Database) -> None:
    gateway = await start_gateway()
    key = await gateway.tenant("writer", ("adapters:write", "inference"))
    await upload(database, "writer")
    answer = await patch(gateway, PATH, {"tool_style": "hermes", "defaults": {"temperature": 0}}, key)
    assert answer.status_code == 200
    document = answer.json()
    assert (document["name"], document["version"], document["digest"]) == ("pirate", 1, DIGEST)
    assert (document["tool_style"], document["defaults"]) == ("hermes", {"temperature": 0})
    assert (await patch(gateway, PATH, {"defaults": None}, key)).json()["tool_style"] == "hermes"
    assert (await patch(gateway, PATH, {}, key)).json()["defaults"] == {}
    await gateway.adapter("writer", "pirate", DIGEST)
    late = await patch(gateway, PATH, {"tool_style": "mistral"}, key)
    assert (late.status_code, late.json()["error"]["code"]) == (409, "conflict")


async def test_the_profile_reaches_the_request(start_gateway: Any, database: Database) -> None:
    gateway = await start_gateway()
    key = await gateway.tenant("writer", ("tenant:admin",))
    await upload(database, "writer")
    await patch(gateway, PATH, {"tool_style": "llama3", "defaults": {"top_k": 7}}, key)
    services: Any = SimpleNamespace(served_model_name="base", database=database)
    caller = await Authenticator(database, 0).authenticate([f"Bearer {key}"])
    model = await resolve_model(services, caller, "pirate@1")
    assert (model.tool_style, model.defaults) == ("llama3", {"top_k": 7})
    base = await resolve_model(services, caller, "base")
    assert (base.tool_style, base.defaults) == (None, {})


async def test_what_another_owns_does_not_exist(start_gateway: Any, database: Database) -> None:
    gateway = await start_gateway()
    rival = await gateway.tenant("rival", ("tenant:admin",))
    await upload(database, "acme")
    messages = set()
    for name in ("pirate", "nobody", "a%00", "ö"):
        path = f"/tenant/v1/adapters/{name}/versions/1"
        answer = await patch(gateway, path, {"tool_style": "hermes"}, rival)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found"), name
        messages.add(answer.json()["error"]["message"].split("named")[0])
    assert messages == {"no adapter "}


@pytest.mark.parametrize("version", ["0", "2", "01", "-1", "one", "1.0", "9" * 10, "9" * 60])
async def test_versions_that_do_not_exist(start_gateway: Any, database: Database, version: str) -> None:
    gateway = await start_gateway()
    key = await gateway.tenant("writer", ("adapters:write",))
    await upload(database, "writer")
    answer = await patch(gateway, f"/tenant/v1/adapters/pirate/versions/{version}", {}, key)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"template": "{{ x }}"}, "unknown_parameter", "template"),
        ({"defaults": {"seed": 1}}, "unknown_parameter", "defaults.seed"),
        ({"defaults": {"temperature": 3}}, "invalid_value", "defaults.temperature"),
        ({"tool_style": "jinja"}, "invalid_value", "tool_style"),
        (b"[]", "invalid_json", None),
    ],
)
async def test_bad_bodies(
    start_gateway: Any, database: Database, body: object, code: str, param: str
) -> None:
    gateway = await start_gateway()
    key = await gateway.tenant("writer", ("adapters:write",))
    await upload(database, "writer")
    error = (await patch(gateway, PATH, body, key)).json()["error"]
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
