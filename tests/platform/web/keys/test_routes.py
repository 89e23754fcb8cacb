"""`/tenant/v1/keys` and `me` over HTTP: responses, refusals, and that a change applies to the next request."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
from sqlalchemy import text
from tests.platform.web.gateway import SECRET

from loraplex.platform.server.secret import derive
from loraplex.platform.web.cursors import CURSOR_DOMAIN, Cursors
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.key_format import parse_key
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database

KEYS = "/tenant/v1/keys"
ME = "/tenant/v1/me"
SHOWN = {"id", "name", "environment", "scopes", "allowed_cidrs", "created_by", "created_at", "expires_at"} | {
    *("revoked_at", "last_used_at", "replaced_by", "parent_id", "limit_root")
}


async def call(gateway: Any, key: str, method: str, path: str, body: object = None, **headers: str) -> Any:
    sent = {"authorization": f"Bearer {key}", **{name.replace("_", "-"): headers[name] for name in headers}}
    content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        return await client.request(method, path, content=content, headers=sent)


def refusal(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


async def test_the_lifecycle_of_a_key(start_gateway: Any, database: Database) -> None:
    gateway = await start_gateway()
    admin = await gateway.tenant("lives", ("tenant:admin",))
    later = (datetime.now(UTC) + timedelta(days=30)).replace(microsecond=0)
    body = {"name": "batch", "scopes": ["usage:read", "inference"], "expires_at": later.isoformat()}
    made = await call(gateway, admin, "POST", KEYS, body | {"allowed_cidrs": ["127.0.0.0/8"]})
    assert made.status_code == 201 and made.headers["cache-control"] == "no-store"
    document = made.json()
    plaintext = document.pop("api_key")
    assert set(document) == SHOWN and document["id"] == parse_key(plaintext).key_id
    assert (
        document["scopes"] == ["inference", "usage:read"]
        and document["created_by"] == parse_key(admin).key_id
    )
    assert datetime.fromisoformat(document["expires_at"]) == later and document["expires_at"].endswith("Z")
    path = f"{KEYS}/{document['id']}"
    seen = await call(gateway, admin, "GET", path)
    assert seen.json() == document and seen.headers["etag"] == made.headers["etag"] == '"1"'

    changed = await call(gateway, admin, "PATCH", path, {"name": "night", "expires_at": None}, if_match='"1"')
    assert changed.status_code == 200 and changed.headers["etag"] == '"2"'
    assert changed.json() == document | {"name": "night", "expires_at": None}

    rotated = await call(gateway, admin, "POST", f"{path}/rotate", {"grace_seconds": 3600})
    new = rotated.json()
    assert rotated.status_code == 201 and new["allowed_cidrs"] == ["127.0.0.0/8"] and new["name"] == "night"
    old = (await call(gateway, admin, "GET", path)).json()
    assert old["replaced_by"] == new["id"] and old["revoked_at"] is None and old["expires_at"] is not None
    for key in (plaintext, new["api_key"]):
        assert (await call(gateway, key, "GET", ME)).status_code == 200

    for _ in range(2):
        assert (await call(gateway, admin, "DELETE", path)).status_code == 204
    assert (await call(gateway, plaintext, "GET", ME)).status_code == 401
    assert (await call(gateway, new["api_key"], "GET", ME)).status_code == 200
    assert (await call(gateway, admin, "POST", f"{path}/rotate")).status_code == 409

    listed = (await call(gateway, admin, "GET", f"{KEYS}?limit=2")).json()
    rest = (await call(gateway, admin, "GET", f"{KEYS}?cursor={listed['next_cursor']}")).json()
    ids = [key["id"] for key in listed["data"] + rest["data"]]
    assert ids == [parse_key(admin).key_id, document["id"], new["id"]] and rest["next_cursor"] is None
    everything = json.dumps([listed, rest, old])
    assert "sha256" not in everything and parse_key(plaintext).secret not in everything

    async with database.as_operator() as session:
        rows = await session.execute(
            text("SELECT action, target, before, after FROM audit_entries ORDER BY id")
        )
    entries = rows.all()
    assert [entry.action.split(".")[1] for entry in entries] == [
        *("create", "change", "rotate", "create", "revoke", "revoke")
    ]
    assert entries[1].target == f"keys/{document['id']}"
    assert (entries[1].before["name"], entries[1].after["name"]) == ("batch", "night")
    written = str(entries)
    assert all(parse_key(key).secret not in written for key in (plaintext, new["api_key"]))


async def test_me_is_for_every_key_of_a_tenant(start_gateway: Any, database: Database) -> None:
    gateway = await start_gateway()
    for scope in ("inference", "usage:read"):
        key = await gateway.tenant(f"me-{scope[:5]}", (scope,))
        document = (await call(gateway, key, "GET", ME)).json()
        assert (document["tenant"]["name"], document["tenant"]["tier"]) == (f"me-{scope[:5]}", "standard")
        assert document["scopes"] == [scope] and set(document["key"]) == SHOWN
        assert document["key"]["id"] == parse_key(key).key_id
        for method, path in (("GET", KEYS), ("POST", KEYS), ("DELETE", f"{KEYS}/x")):
            assert refusal(await call(gateway, key, method, path))[:2] == (403, "insufficient_scope")
    async with database.as_operator() as session:
        operator = (await KeyRepository(session).create(None, "op", ["operator"])).plaintext
    for path in (ME, KEYS):
        assert refusal(await call(gateway, operator, "GET", path))[:2] == (403, "insufficient_scope")


async def test_another_tenants_keys_do_not_exist(start_gateway: Any) -> None:
    gateway = await start_gateway()
    rival = await gateway.tenant("rival", ("tenant:admin",))
    messages = set()
    for key_id in (parse_key(gateway.key).key_id, "0" * 16, "x", "%00", "a" * 5000):
        for method, path in (("GET", ""), ("PATCH", ""), ("DELETE", ""), ("POST", "/rotate")):
            response = await call(gateway, rival, method, f"{KEYS}/{key_id}{path}", {}, if_match='"1"')
            if method == "DELETE":
                response = await call(gateway, rival, method, f"{KEYS}/{key_id}")
            assert refusal(response) == (404, "not_found", None), (method, key_id)
            messages.add(response.json()["error"]["message"].split("'")[0])
    assert messages == {"no key "}
    assert (await call(gateway, gateway.key, "GET", ME)).status_code == 200


REFUSED: list[tuple[dict[str, object], tuple[int, str, str | None]]] = [
    ({}, (400, "missing_required_parameter", "name")),
    ({"name": ""}, (400, "invalid_value", "name")),
    ({"name": "a\nb"}, (400, "invalid_value", "name")),
    ({"name": 1}, (400, "invalid_value", "name")),
    ({"name": "x", "role": "admin"}, (400, "unknown_parameter", "role")),
    ({"name": "x", "environment": "live"}, (400, "unknown_parameter", "environment")),
    ({"name": "x", "scopes": []}, (400, "invalid_value", "scopes")),
    ({"name": "x", "scopes": ["root"]}, (400, "invalid_value", "scopes")),
    ({"name": "x", "scopes": ["operator"]}, (403, "insufficient_scope", None)),
    ({"name": "x", "scopes": ["tenant:admin"]}, (403, "insufficient_scope", None)),
    ({"name": "x", "scopes": ["inference", "billing:read"]}, (403, "insufficient_scope", None)),
    ({"name": "x", "expires_at": "2001-01-01T00:00:00Z"}, (400, "invalid_value", "expires_at")),
    ({"name": "x", "expires_at": "2099-01-01T00:00:00"}, (400, "invalid_value", "expires_at")),
    ({"name": "x", "expires_at": "2099-01-01"}, (400, "invalid_value", "expires_at")),
    ({"name": "x", "expires_at": "4070908800"}, (400, "invalid_value", "expires_at")),
    ({"name": "x", "expires_at": 4070908800}, (400, "invalid_value", "expires_at")),
    ({"name": "x", "expires_at": "2099-13-01T00:00:00Z"}, (400, "invalid_value", "expires_at")),
    ({"name": "x", "expires_at": "9999-12-31T23:59:59-23:59"}, (400, "invalid_value", "expires_at")),
    ({"name": "x", "expires_at": "0001-01-01T00:00:00+23:59"}, (400, "invalid_value", "expires_at")),
    ({"name": "x", "allowed_cidrs": ["10.0.0.1/8"]}, (400, "invalid_value", "allowed_cidrs")),
    ({"name": "x", "allowed_cidrs": ["10.0.0.0/8"] * 65}, (400, "invalid_value", "allowed_cidrs")),
    ({"name": "x", "allowed_cidrs": "10.0.0.0/8"}, (400, "invalid_value", "allowed_cidrs")),
]


async def test_refused_keys(start_gateway: Any) -> None:
    gateway = await start_gateway()
    manager = await gateway.tenant("manager", ("keys:write", "inference"))
    for body, expected in REFUSED:
        assert refusal(await call(gateway, manager, "POST", KEYS, body)) == expected, body
    assert len((await call(gateway, manager, "GET", KEYS)).json()["data"]) == 1


async def test_changes_that_are_refused_change_nothing(start_gateway: Any, database: Database) -> None:
    gateway = await start_gateway()
    manager = await gateway.tenant("manager", ("keys:write", "inference"))
    async with database.as_operator() as session:
        owner = await TenantRepository(session).get("manager")
        admin = (await KeyRepository(session).create(owner.id, "admin", ["tenant:admin"])).plaintext
    own, wider = f"{KEYS}/{parse_key(manager).key_id}", f"{KEYS}/{parse_key(admin).key_id}"
    for path, body, headers, expected in (
        (own, {"name": "x"}, {}, (428, "precondition_required")),
        (own, {"name": "x"}, {"if_match": "1"}, (400, "invalid_value")),
        (own, {"name": "x"}, {"if_match": '"7"'}, (412, "precondition_failed")),
        (own, {"name": None}, {"if_match": '"1"'}, (400, "invalid_value")),
        (own, {"scopes": None}, {"if_match": '"1"'}, (400, "invalid_value")),
        (own, {"scopes": ["tenant:admin"]}, {"if_match": '"1"'}, (403, "insufficient_scope")),
        (own, {"revoked_at": None}, {"if_match": '"1"'}, (400, "unknown_parameter")),
        (own, {"tenant_id": "x"}, {"if_match": '"1"'}, (400, "unknown_parameter")),
        (own, {"secret_sha256": "x"}, {"if_match": '"1"'}, (400, "unknown_parameter")),
        (wider, {"name": "x"}, {"if_match": '"1"'}, (403, "insufficient_scope")),
        (wider, {"expires_at": None}, {"if_match": '"1"'}, (403, "insufficient_scope")),
    ):
        assert refusal(await call(gateway, manager, "PATCH", path, body, **headers))[:2] == expected, body
    for method, path in (("DELETE", wider), ("POST", f"{wider}/rotate")):
        assert refusal(await call(gateway, manager, method, path))[:2] == (403, "insufficient_scope")
    for grace in (-1, 30 * 24 * 3600 + 1, 1.5, "1"):
        response = await call(gateway, manager, "POST", f"{own}/rotate", {"grace_seconds": grace})
        assert refusal(response) == (400, "invalid_value", "grace_seconds")
    assert (await call(gateway, admin, "GET", own)).headers["etag"] == '"1"'


async def test_a_repeated_post_creates_one_key_and_returns_it_again(start_gateway: Any) -> None:
    gateway = await start_gateway()
    admin = await gateway.tenant("repeats", ("tenant:admin",))
    answers = [
        await call(gateway, admin, "POST", KEYS, {"name": "once"}, idempotency_key="abc") for _ in range(2)
    ]
    assert answers[0].json() == answers[1].json() and answers[0].json()["scopes"] == ["inference"]
    other = await call(gateway, admin, "POST", KEYS, {"name": "twice"}, idempotency_key="abc")
    assert refusal(other)[:2] == (422, "idempotency_mismatch")
    assert len((await call(gateway, admin, "GET", KEYS)).json()["data"]) == 2


async def test_the_key_quota_is_enforced_for_concurrent_requests(
    start_gateway: Any, database: Database
) -> None:
    gateway = await start_gateway()
    admin = await gateway.tenant("many", ("tenant:admin",))
    async with database.as_operator() as session:
        await session.execute(
            text(
                "INSERT INTO quotas (id, tenant_id, max_keys) SELECT gen_random_uuid(), id, 3 FROM tenants"
                " WHERE name = 'many'"
            )
        )
    answers = await asyncio.gather(
        *(call(gateway, admin, "POST", KEYS, {"name": f"key {number}"}) for number in range(6))
    )
    assert sorted(response.status_code for response in answers) == [201, 201, 409, 409, 409, 409]
    refused = next(response for response in answers if response.status_code == 409)
    assert refusal(refused)[1] == "limit_reached" and "max_keys" in refused.json()["error"]["message"]


async def test_a_network_restriction_applies_to_every_plane_at_the_next_request(start_gateway: Any) -> None:
    gateway = await start_gateway()
    admin = await gateway.tenant("bound", ("tenant:admin",))
    made = (await call(gateway, admin, "POST", KEYS, {"name": "x", "scopes": ["tenant:admin"]})).json()
    path, key = f"{KEYS}/{made['id']}", made["api_key"]
    assert (await call(gateway, key, "GET", "/v1/models")).status_code == 200
    await call(gateway, admin, "PATCH", path, {"allowed_cidrs": ["10.0.0.0/8"]}, if_match='"1"')
    for plane in (ME, "/v1/models"):
        response = await call(gateway, key, "GET", plane, x_forwarded_for="10.0.0.1")
        assert refusal(response)[:2] == (403, "address_not_allowed")
    await call(gateway, admin, "PATCH", path, {"allowed_cidrs": ["127.0.0.1", "::1"]}, if_match='"2"')
    assert (await call(gateway, key, "GET", ME)).json()["key"]["allowed_cidrs"] == ["127.0.0.1/32", "::1/128"]


async def test_a_restricted_key_creates_no_key_with_fewer_restrictions(
    start_gateway: Any, database: Database
) -> None:
    gateway = await start_gateway()
    admin = await gateway.tenant("fenced", ("tenant:admin",))
    end = (datetime.now(UTC) + timedelta(days=3)).replace(microsecond=0)
    bounds = {"allowed_cidrs": ["127.0.0.0/8"], "expires_at": end.isoformat()}
    body = {"name": "fenced", "scopes": ["tenant:admin"]} | bounds
    fenced = (await call(gateway, admin, "POST", KEYS, body)).json()["api_key"]
    own, free = f"{KEYS}/{parse_key(fenced).key_id}", f"{KEYS}/{parse_key(admin).key_id}"
    later = (end + timedelta(days=1)).isoformat()
    for method, path, sent, field in (
        ("POST", KEYS, {"name": "x", "allowed_cidrs": []}, "allowed_cidrs"),
        ("POST", KEYS, {"name": "x", "allowed_cidrs": ["0.0.0.0/0"]}, "allowed_cidrs"),
        ("POST", KEYS, {"name": "x", "expires_at": None}, "expires_at"),
        ("POST", KEYS, {"name": "x", "expires_at": later}, "expires_at"),
        ("PATCH", own, {"allowed_cidrs": []}, "allowed_cidrs"),
        ("PATCH", own, {"expires_at": None}, "expires_at"),
        ("POST", f"{free}/rotate", {}, "allowed_cidrs"),
    ):
        response = await call(
            gateway, fenced, method, path, sent, **({} if method == "POST" else {"if_match": '"1"'})
        )
        assert refusal(response) == (403, "insufficient_scope", field), (method, path, sent)
    heir = (await call(gateway, fenced, "POST", KEYS, {"name": "heir"})).json()
    assert heir["allowed_cidrs"] == ["127.0.0.0/8"] and datetime.fromisoformat(heir["expires_at"]) == end
    rotated = await call(gateway, fenced, "POST", f"{own}/rotate")
    assert rotated.status_code == 201 and rotated.json()["expires_at"] == heir["expires_at"]


async def test_a_cursor_of_the_last_release_goes_on_where_it_was(
    start_gateway: Any, database: Database
) -> None:
    """Its position is the time and the internal id of a key."""
    gateway = await start_gateway()
    admin = await gateway.tenant("lists", ("tenant:admin",))
    for name in ("second", "third"):
        body = {"name": name, "scopes": ["inference"]}
        assert (await call(gateway, admin, "POST", KEYS, body)).status_code == 201
    async with database.as_operator() as session:
        rows = await session.execute(
            text(
                "SELECT id, created_at, name, tenant_id FROM api_keys WHERE name <> 'key' ORDER BY created_at"
            )
        )
        (first, *_) = rows.all()
    scope = f"{first.tenant_id} {KEYS}".encode()
    cursors = Cursors(derive(SECRET, CURSOR_DOMAIN), scope)
    cursor = cursors.encode({}, (first.created_at.astimezone(UTC).isoformat(), str(first.id)))
    rest = (await call(gateway, admin, "GET", f"{KEYS}?cursor={cursor}")).json()
    assert [each["name"] for each in rest["data"]] == ["third"] and rest["next_cursor"] is None
