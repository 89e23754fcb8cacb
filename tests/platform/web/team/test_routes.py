"""`/tenant/v1/users` over HTTP: responses and refusals, pages, and that a link is shown once."""

import json
from typing import Any
from uuid import UUID

from sqlalchemy import text
from tests.platform.web.keys.test_routes import call, refusal
from tests.tenants.people.people_world import add_person

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.database import Database

USERS = "/tenant/v1/users"
EVE = {"email": "Eve@example.com", "role": "viewer"}


async def make_member(database: Database, tenant: str, email: str, role: str) -> UUID:
    async with database.as_operator() as session:
        tenant_id = (await TenantRepository(session).get(tenant)).id
    return await add_person(database, email, roles={tenant_id: role})


async def test_a_repeated_invitation_is_one(start_gateway: Any, database: Database) -> None:
    gateway = await start_gateway()
    admin = await gateway.tenant("lives", ("tenant:admin",))
    first = await call(gateway, admin, "POST", USERS, EVE, idempotency_key="k1")
    again = await call(gateway, admin, "POST", USERS, EVE, idempotency_key="k1")
    assert first.status_code == again.status_code == 201 and first.headers["cache-control"] == "no-store"
    document = first.json()
    assert again.json() == document and "etag" not in first.headers
    path = document.pop("invitation_path")
    assert path.startswith("/console/sign-in?token=") and len(path) > 60
    assert (document["email"], document["role"], document["state"]) == (
        "eve@example.com",
        "viewer",
        "invited",
    )
    listed = (await call(gateway, admin, "GET", USERS)).json()
    assert listed["data"] == [document]
    audit = (await call(gateway, admin, "GET", "/tenant/v1/audit")).json()
    assert path.partition("=")[2] not in json.dumps([listed, audit])
    async with database.as_operator() as session:
        assert await session.scalar(text("SELECT count(*) FROM invitations")) == 1


async def test_a_role_changes_under_its_etag(start_gateway: Any, database: Database) -> None:
    gateway = await start_gateway()
    admin = await gateway.tenant("lives", ("tenant:admin",))
    eve = await make_member(database, "lives", "eve@example.com", "admin")
    path = f"{USERS}/{eve}"
    assert refusal(await call(gateway, admin, "PATCH", path, {"role": "viewer"}))[:2] == (
        428,
        "precondition_required",
    )
    last = await call(gateway, admin, "PATCH", path, {"role": "viewer"}, if_match='"1"')
    assert refusal(last)[:2] == (409, "conflict") and "last admin" in last.text
    assert refusal(await call(gateway, admin, "DELETE", path))[:2] == (409, "conflict")
    await make_member(database, "lives", "mara@example.com", "admin")
    changed = await call(gateway, admin, "PATCH", path, {"role": "viewer"}, if_match='"1"')
    assert (changed.status_code, changed.json()["role"], changed.headers["etag"]) == (200, "viewer", '"2"')
    stale = await call(gateway, admin, "PATCH", path, {"role": "billing"}, if_match='"1"')
    assert refusal(stale)[:2] == (412, "precondition_failed")
    for body in ({"role": "owner"}, {"role": "viewer", "email": "x@example.com"}):
        assert (await call(gateway, admin, "PATCH", path, body, if_match='"2"')).status_code == 400
    assert (await call(gateway, admin, "DELETE", path)).status_code == 204
    assert (await call(gateway, admin, "DELETE", path)).status_code == 404


async def test_members_and_invitations_are_paged_together(start_gateway: Any, database: Database) -> None:
    gateway = await start_gateway()
    admin = await gateway.tenant("lives", ("tenant:admin",))
    await make_member(database, "lives", "first@example.com", "admin")
    for number in range(3):
        body = {"email": f"new{number}@example.com", "role": "viewer"}
        assert (await call(gateway, admin, "POST", USERS, body)).status_code == 201
    await make_member(database, "lives", "last@example.com", "billing")
    found, query = [], "?limit=2"
    while query:
        page = (await call(gateway, admin, "GET", f"{USERS}{query}")).json()
        found += [each["email"].partition("@")[0] for each in page["data"]]
        query = f"?limit=2&cursor={page['next_cursor']}" if page["next_cursor"] else ""
    assert found == ["first", "new0", "new1", "new2", "last"]


async def test_a_key_that_is_bound_to_networks_gives_no_role(start_gateway: Any, database: Database) -> None:
    gateway = await start_gateway()
    admin = await gateway.tenant("lives", ("tenant:admin",))
    eve = await make_member(database, "lives", "eve@example.com", "viewer")
    body = {"name": "bound", "scopes": ["tenant:admin"], "allowed_cidrs": ["127.0.0.0/8"]}
    made = await call(gateway, admin, "POST", "/tenant/v1/keys", body)
    bound = made.json()["api_key"]
    assert (await call(gateway, bound, "GET", USERS)).status_code == 200
    for role in ("admin", "viewer"):
        invited = await call(gateway, bound, "POST", USERS, {"email": "new@example.com", "role": role})
        assert refusal(invited) == (403, "insufficient_scope", "allowed_cidrs")
        assert "works from 127.0.0.0/8 only, and people sign in from everywhere" in invited.text
        changed = await call(gateway, bound, "PATCH", f"{USERS}/{eve}", {"role": role}, if_match='"1"')
        assert refusal(changed) == (403, "insufficient_scope", "allowed_cidrs")
    assert (await call(gateway, admin, "POST", USERS, EVE | {"email": "x@example.com"})).status_code == 201


async def test_a_key_that_is_limited_gives_no_role(start_gateway: Any, database: Database) -> None:
    """By itself or by its group: a person's own keys would have no limits."""
    gateway = await start_gateway()
    admin = await gateway.tenant("lives", ("tenant:admin",))
    body = {"name": "limited", "scopes": ["tenant:admin"]}
    made = (await call(gateway, admin, "POST", "/tenant/v1/keys", body)).json()
    below = (await call(gateway, made["api_key"], "POST", "/tenant/v1/keys", body)).json()
    path = f"/tenant/v1/keys/{made['id']}/quotas"
    limits = {"requests_per_minute": 100}
    assert (await call(gateway, admin, "PUT", path, limits, if_match='"1"')).status_code == 200
    for number, (key, status) in enumerate([(made, 403), (below, 403), ({"api_key": admin}, 201)]):
        new = {"email": f"new{number}@example.com", "role": "viewer"}
        invited = await call(gateway, key["api_key"], "POST", USERS, new)
        assert invited.status_code == status
        if status == 403:
            assert refusal(invited) == (403, "insufficient_scope", "requests_per_minute")
