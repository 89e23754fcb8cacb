"""Every route x every kind of caller: the route's scope alone decides which callers are accepted."""

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from tests.platform.web.gateway import Gateway, start_gateway
from tests.platform.web.route_table import ANY_KEY, OPERATOR, SCOPES, in_process, routes_of

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database
from loraplex.tenants.models import ApiKey
from loraplex.tenants.scopes import TENANT_ADMIN, TENANT_SCOPES, effective_scopes

__all__ = ["start_gateway"]

REFUSED = {"invalid_api_key": 401, "insufficient_scope": 403, "tenant_suspended": 403}
TOLD = {"API key": "invalid_api_key", "suspended": "tenant_suspended", "": "insufficient_scope"}
STRANGERS = {
    "no key": "invalid_api_key",
    "malformed": "invalid_api_key",
    "mistyped": "invalid_api_key",
    "expired": "invalid_api_key",
    "revoked": "invalid_api_key",
    "deleted": "invalid_api_key",
    "suspended": "tenant_suspended",
}


def expected(role: str, scope: str) -> str | None:
    """The error's code; None for an accepted caller."""
    if role in STRANGERS:
        return STRANGERS[role]
    held = {OPERATOR} if role == OPERATOR else {ANY_KEY, *effective_scopes([role])}
    return None if scope in held else "insufficient_scope"


async def keys_of_roles(database: Database) -> dict[str, str | None]:
    """A key for every role; all but the narrow ones may do everything in their tenant."""
    keys: dict[str, str | None] = {"no key": None, "malformed": "sk-nonsense"}
    async with database.as_operator() as session:
        tenants, issue = TenantRepository(session), KeyRepository(session).create
        owner = (await tenants.create("roles")).id
        for scope in sorted(TENANT_SCOPES):
            keys[scope] = (await issue(owner, scope, [scope])).plaintext
        keys[OPERATOR] = (await issue(None, "operator", ["operator"])).plaintext
        ended: dict[str, ApiKey] = {}
        for role in ("expired", "revoked"):
            issued = await issue(owner, role, [TENANT_ADMIN])
            keys[role], ended[role] = issued.plaintext, issued.record
        ended["expired"].expires_at = datetime.now(UTC) - timedelta(seconds=1)
        ended["revoked"].revoked_at = datetime.now(UTC)
        for role in ("suspended", "deleted"):
            tenant = await tenants.create(role)
            keys[role] = (await issue(tenant.id, "key", [TENANT_ADMIN])).plaintext
            setattr(tenant, f"{role}_at", datetime.now(UTC))
    admin = keys[TENANT_ADMIN] or ""
    keys["mistyped"] = admin[:-1] + ("0" if admin[-1] != "0" else "1")
    return keys


def path_of(route: str) -> tuple[str, str]:
    """Method and path, with unknown ids."""
    method, _, path = route.partition(" ")
    return method, "/".join("nonesuch" if part.startswith("{") else part for part in path.split("/"))


async def said(client: httpx.AsyncClient, route: str, key: str | None) -> str | None:
    """The code of a refusal by role; None for any other answer."""
    method, path = path_of(route)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    response = await client.request(method, path, headers=headers)
    assert response.status_code < 500, (route, response.text)
    if response.status_code not in REFUSED.values():
        return None
    error = response.json()["error"]
    # Errors of the Messages API have no code: their texts differ.
    code: str = error.get("code") or next(code for word, code in TOLD.items() if word in error["message"])
    assert response.status_code == REFUSED[code], (route, response.text)
    return code


@pytest.fixture
async def gateway(start_gateway: Any) -> Gateway:
    found: Gateway = await start_gateway()
    return found


async def test_which_callers_are_accepted(gateway: Gateway, database: Database) -> None:
    assert routes_of(gateway.app) == SCOPES.keys()
    keys = await keys_of_roles(database)
    assert keys.keys() == {*STRANGERS, *TENANT_SCOPES, OPERATOR}
    async with in_process(gateway.app) as client:
        wrong = {
            (route, role): code
            for route, scope in SCOPES.items()
            for role, key in keys.items()
            if (code := await said(client, route, key)) != expected(role, scope)
        }
    assert wrong == {}


async def test_a_refusal_does_not_reveal_what_exists(gateway: Gateway, database: Database) -> None:
    """Before the scope is known to suffice, no id is looked at: the answer is the same for all."""
    keys = await keys_of_roles(database)
    async with database.as_operator() as session:
        known = (await TenantRepository(session).get("acme")).id
    async with in_process(gateway.app) as client:
        for role in ("no key", "suspended", TENANT_ADMIN):
            headers = {"authorization": f"Bearer {keys[role]}"}
            responses = [
                await client.get(f"/operator/v1/tenants/{name}", headers=headers)
                for name in (known, "nonesuch")
            ]
            assert responses[0].content == responses[1].content


async def test_no_byte_of_a_body_is_read_before_the_key_is_accepted(gateway: Gateway) -> None:
    async def receive() -> Any:
        raise AssertionError("the body was read")

    statuses = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    headers = [(b"content-type", b"application/json"), (b"content-length", b"1000")]
    for route in SCOPES:
        method, path = path_of(route)
        scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}
        await gateway.app(scope, receive, send)
    assert statuses == [401] * len(SCOPES)
