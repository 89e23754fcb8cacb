"""`/tenant/v1/webhooks` over HTTP: responses, refusals, and that a secret is shown once."""

import json
from typing import Any
from uuid import UUID

from sqlalchemy import select, text
from standardwebhooks import Webhook
from tests.platform.web.keys.test_routes import call, refusal
from tests.tenants.webhooks.webhooks import add_event, dispatched, end

from loraplex.platform.inference.dependencies import ServingConfig
from loraplex.tenants.database import Database
from loraplex.tenants.models import WebhookEndpoint
from loraplex.tenants.webhooks.records import MAX_GRACE_S, MAX_WEBHOOKS

WEBHOOKS = "/tenant/v1/webhooks"
BODY = {"url": "https://example.com/hooks", "events": ["invoice.finalized", "adapter.ready", "adapter.ready"]}
SHOWN = {"id", "url", "events", "previous_secret_until", "created_at", "revision"}


async def tenant_of(database: Database) -> UUID:
    async with database.as_operator() as session:
        return (await session.scalars(select(WebhookEndpoint.tenant_id))).one()


async def test_the_lifecycle_of_a_webhook(start_gateway: Any, database: Database) -> None:
    gateway = await start_gateway()
    admin = await gateway.tenant("lives", ("tenant:admin",))
    made = await call(gateway, admin, "POST", WEBHOOKS, BODY)
    assert made.status_code == 201 and made.headers["cache-control"] == "no-store"
    document = made.json()
    secret = document.pop("secret")
    assert secret.startswith("whsec_") and len(Webhook(secret)._whsecret) == 32
    assert set(document) == SHOWN and document["events"] == ["adapter.ready", "invoice.finalized"]
    path = f"{WEBHOOKS}/{document['id']}"
    seen = await call(gateway, admin, "GET", path)
    assert seen.json() == document and seen.headers["etag"] == made.headers["etag"] == '"1"'

    changed = await call(
        gateway, admin, "PATCH", path, {"url": "https://example.com:8443/new"}, if_match='"1"'
    )
    assert changed.status_code == 200 and changed.headers["etag"] == '"2"'
    assert changed.json() == document | {"url": "https://example.com:8443/new", "revision": 2}
    stale = await call(gateway, admin, "PATCH", path, {"events": ["adapter.ready"]}, if_match='"1"')
    assert refusal(stale)[:2] == (412, "precondition_failed")
    assert refusal(await call(gateway, admin, "PATCH", path, {}))[:2] == (428, "precondition_required")

    rotated = await call(gateway, admin, "POST", f"{path}/rotate")
    assert rotated.status_code == 201 and rotated.json()["secret"] != secret
    assert rotated.json()["previous_secret_until"] is not None and rotated.headers["etag"] == '"3"'
    at_once = await call(gateway, admin, "POST", f"{path}/rotate", {"grace_seconds": 0})
    assert at_once.json()["previous_secret_until"] is None

    listed = (await call(gateway, admin, "GET", WEBHOOKS)).json()
    assert [each["id"] for each in listed["data"]] == [document["id"]]
    audit = (await call(gateway, admin, "GET", "/tenant/v1/audit")).json()
    everything = json.dumps([listed, seen.json(), changed.json(), audit])
    assert "whsec_" not in everything and secret.removeprefix("whsec_") not in everything
    async with database.as_operator() as session:
        rows = (await session.execute(text("SELECT sealed_secret FROM webhook_endpoints"))).all()
    assert b"whsec_" not in rows[0][0]

    assert (await call(gateway, admin, "DELETE", path)).status_code == 204
    for method in ("GET", "DELETE"):
        assert refusal(await call(gateway, admin, method, path))[:2] == (404, "not_found")


async def test_a_repeated_creation_shows_the_same_secret(start_gateway: Any) -> None:
    gateway = await start_gateway()
    admin = await gateway.tenant("repeats", ("tenant:admin",))
    first, second = [
        await call(gateway, admin, "POST", WEBHOOKS, BODY, idempotency_key="once") for _ in range(2)
    ]
    assert first.json() == second.json() and second.headers["idempotency-replayed"] == "true"
    assert len((await call(gateway, admin, "GET", WEBHOOKS)).json()["data"]) == 1


REFUSED: tuple[tuple[dict[str, object], str], ...] = (
    ({"url": "http://example.com/"}, "url"),
    ({"url": "https://169.254.169.254/latest"}, "url"),
    ({"url": "https://[::1]/"}, "url"),
    ({"url": "https://2130706433/"}, "url"),
    ({"url": "https://127.1/"}, "url"),
    ({"url": "https://localhost/"}, "url"),
    ({"url": "https://user:secret@example.com/"}, "url"),
    ({"url": "https://example.com:25/"}, "url"),
    ({"url": "https://example.com/" + "a" * 2048}, "url"),
    ({"events": []}, "events"),
    ({"events": ["adapter.deleted"]}, "events"),
    ({"secret": "whsec_mine"}, "secret"),
)


async def test_what_is_refused_is_named(start_gateway: Any) -> None:
    gateway = await start_gateway()
    admin = await gateway.tenant("refused", ("tenant:admin",))
    for change, param in REFUSED:
        refused = await call(gateway, admin, "POST", WEBHOOKS, BODY | change)
        assert refusal(refused)[::2] == (400, param), change
    assert (await call(gateway, admin, "GET", WEBHOOKS)).json()["data"] == []
    made = (await call(gateway, admin, "POST", WEBHOOKS, BODY)).json()["id"]
    change = {"url": "https://0177.0.0.1/hooks"}
    moved = await call(gateway, admin, "PATCH", f"{WEBHOOKS}/{made}", change, if_match='"1"')
    assert refusal(moved)[::2] == (400, "url")


async def test_a_tenant_has_a_bounded_number(start_gateway: Any) -> None:
    gateway = await start_gateway()
    admin = await gateway.tenant("many", ("tenant:admin",))
    for _ in range(MAX_WEBHOOKS):
        made = await call(gateway, admin, "POST", WEBHOOKS, BODY)
        assert made.status_code == 201
    assert refusal(await call(gateway, admin, "POST", WEBHOOKS, BODY))[:2] == (409, "limit_reached")
    path = f"{WEBHOOKS}/{made.json()['id']}/rotate"
    long = await call(gateway, admin, "POST", path, {"grace_seconds": MAX_GRACE_S + 1})
    assert refusal(long)[::2] == (400, "grace_seconds")


async def test_deliveries_are_listed_and_replayed(start_gateway: Any, database: Database) -> None:
    gateway = await start_gateway()
    admin = await gateway.tenant("lists", ("tenant:admin",))
    key = {"name": "reader", "scopes": ["billing:read"]}
    reader = (await call(gateway, admin, "POST", "/tenant/v1/keys", key)).json()["api_key"]
    made = (await call(gateway, admin, "POST", WEBHOOKS, BODY)).json()
    path, tenant_id = f"{WEBHOOKS}/{made['id']}/deliveries", await tenant_of(database)
    ids = []
    for _ in range(3):
        await add_event(database, tenant_id)
        ids.append(str(await dispatched(database, UUID(made["id"]))))
    await end(database, UUID(ids[0]), "dead")
    await end(database, UUID(ids[1]), "delivered")

    page = (await call(gateway, reader, "GET", f"{path}?limit=2")).json()
    rest = (await call(gateway, reader, "GET", f"{path}?cursor={page['next_cursor']}")).json()
    assert [each["id"] for each in page["data"] + rest["data"]] == ids[::-1] and rest["next_cursor"] is None
    assert [each["state"] for each in page["data"] + rest["data"]] == ["pending", "delivered", "dead"]
    assert [each["next_attempt_at"] is None for each in page["data"]] == [False, True]
    dead = (await call(gateway, reader, "GET", f"{path}?state=dead")).json()["data"]
    assert [each["id"] for each in dead] == ids[:1] and dead[0]["type"] == "invoice.finalized"
    assert refusal(await call(gateway, reader, "GET", f"{path}?state=lost"))[::2] == (400, "state")

    assert (await call(gateway, reader, "POST", f"{path}/{ids[0]}/replay")).status_code == 403
    replayed = await call(gateway, admin, "POST", f"{path}/{ids[0]}/replay")
    assert replayed.status_code == 202 and replayed.json()["state"] == "pending"
    assert replayed.json()["event_id"] == dead[0]["event_id"]
    again = await call(gateway, admin, "POST", f"{path}/{ids[0]}/replay")
    assert refusal(again)[:2] == (409, "conflict")
    unknown = await call(gateway, admin, "POST", f"{path}/nonesuch/replay")
    assert refusal(unknown)[:2] == (404, "not_found")


async def test_a_private_address_needs_the_operators_setting(start_gateway: Any) -> None:
    private = {"url": "http://10.0.0.1:8080/hooks", "events": ["adapter.ready"]}
    gateway = await start_gateway(limits=ServingConfig(key_cache_s=0.0, webhook_allow_private=True))
    admin = await gateway.tenant("inside", ("tenant:admin",))
    made = await call(gateway, admin, "POST", WEBHOOKS, private)
    assert made.status_code == 201 and made.json()["url"] == private["url"]
