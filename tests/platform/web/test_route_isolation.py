"""Every route with an id in its path, called by another tenant: 404, with the same text as for an unknown id."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import httpx
from tests.platform.web.evaluations.stored_evaluation import add_evaluation
from tests.platform.web.gateway import Gateway, start_gateway
from tests.platform.web.invoices.drafted_invoice import draft_invoice
from tests.platform.web.route_table import OPERATOR, SCOPES, in_process, routes_of
from tests.platform.web.upload_server import CONFIG, WEIGHTS, declared
from tests.tenants.ledger.stored_usage import Used, UsingTenant, settle
from tests.tenants.people.people_world import add_person
from tests.tenants.webhooks.webhooks import add_event, add_webhook, dispatched

from loraplex.engine.fake_engine import DEFAULT_INFO
from loraplex.platform.inference.decisions.wording import FORMAT
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.counters.counter_replies import Explanation
from loraplex.tenants.database import Database
from loraplex.tenants.registry.uploads import DeclaredFile, UploadRepository, UploadTerms
from loraplex.tenants.scopes import TENANT_ADMIN

__all__ = ["start_gateway"]

DIGEST = "a" * 64
FOUND = {200, 201, 202, 204, 409, 412}
UNKNOWN = {
    "key_id": "0" * 16,
    "name": "nonesuch",
    "name:path": "nonesuch",
    "version": "7",
    "alias": "nonesuch",
    "tenant_id": str(uuid4()),
    "request_id": "nonesuch",
    "upload_id": str(uuid4()),
    "webhook_id": str(uuid4()),
    "delivery_id": str(uuid4()),
    "file": CONFIG,
    "number": "1",
    "invoice_id": str(uuid4()),
    "user_id": str(uuid4()),
    "evaluation_id": str(uuid4()),
}
FILES = {CONFIG: b"{}", WEIGHTS: b"weights"}


@dataclass(frozen=True)
class Case:
    """What a request needs so that nothing but its ids decides. `ids` besides those of the tenant's world."""

    body: object = None
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None
    files: Mapping[str, bytes] | None = None


IF_MATCH = {"if-match": '"1"'}
OF_NO_TENANT = {"POST /operator/v1/engines/{number}/drain", "DELETE /operator/v1/suites/{name}"}
CALIBRATION = {
    "format": FORMAT,
    "system_fingerprint": DEFAULT_INFO.system_fingerprint,
    "temperatures": {"choice": 2.0},
    "report": {},
}
# What ends an object comes last, so that every case finds its own.
CASES: Mapping[str, Case] = {
    "GET /v1/models/{name:path}": Case(),
    "GET /tenant/v1/keys/{key_id}": Case(),
    "PATCH /tenant/v1/keys/{key_id}": Case({"name": "renamed"}, IF_MATCH),
    "GET /tenant/v1/adapters/{name}": Case(),
    "PATCH /tenant/v1/adapters/{name}": Case({"description": "mine"}, IF_MATCH),
    "GET /tenant/v1/adapters/{name}/versions": Case(),
    "GET /tenant/v1/adapters/{name}/versions/{version}": Case(),
    "PATCH /tenant/v1/adapters/{name}/versions/{version}": Case({}, IF_MATCH),
    "GET /tenant/v1/adapters/{name}/aliases": Case(),
    "GET /tenant/v1/adapters/{name}/aliases/{alias}": Case(),
    "PUT /tenant/v1/adapters/{name}/aliases/{alias}/gate": Case({"suite": "conformance", "min_pass": 0.5}),
    "GET /tenant/v1/adapters/{name}/aliases/{alias}/gate": Case(),
    "DELETE /tenant/v1/adapters/{name}/aliases/{alias}/gate": Case(),
    "POST /tenant/v1/adapters/{name}/versions/{version}/evaluations": Case({"suite": "conformance"}),
    "GET /tenant/v1/adapters/{name}/versions/{version}/evaluations": Case(),
    "GET /tenant/v1/evaluations/{evaluation_id}": Case(),
    "GET /tenant/v1/evaluations/{evaluation_id}/report": Case(),
    "POST /tenant/v1/evaluations/{evaluation_id}/cancel": Case(),
    "GET /tenant/v1/suites/{name}": Case(),
    "GET /tenant/v1/suites/{name}/content": Case(),
    "DELETE /tenant/v1/suites/{name}": Case(),
    "PUT /tenant/v1/adapters/{name}/aliases/{alias}": Case({"version": 1}, IF_MATCH),
    "PUT /tenant/v1/adapters/{name}/versions/{version}/decision-calibration": Case(CALIBRATION),
    "GET /tenant/v1/adapters/{name}/versions/{version}/decision-calibration": Case(),
    "POST /tenant/v1/adapters/{name}/versions/{version}/deprecate": Case(),
    "POST /tenant/v1/adapters/{name}/versions/{version}/restore": Case(),
    "POST /tenant/v1/adapters/{name}/aliases/{alias}/rollback": Case(),
    "GET /tenant/v1/keys/{key_id}/quotas": Case(),
    "PUT /tenant/v1/keys/{key_id}/quotas": Case({}, IF_MATCH),
    "GET /tenant/v1/adapters/{name}/quotas": Case(),
    "PUT /tenant/v1/adapters/{name}/quotas": Case({}, IF_MATCH),
    "GET /tenant/v1/limits/explain/{request_id}": Case(),
    "GET /tenant/v1/requests/{request_id}": Case(),
    "GET /tenant/v1/requests/{request_id}/timeline": Case(),
    "POST /tenant/v1/keys/{key_id}/rotate": Case({"grace_seconds": 60}),
    "POST /tenant/v1/adapters/{name}/versions": Case(files=FILES),
    "POST /tenant/v1/adapters/{name}/uploads": Case({"files": declared(FILES)}),
    "GET /tenant/v1/uploads/{upload_id}": Case(),
    "PUT /tenant/v1/uploads/{upload_id}/{file}/parts/{number}": Case(content=FILES[CONFIG]),
    "POST /tenant/v1/uploads/{upload_id}/complete": Case(),
    "DELETE /tenant/v1/uploads/{upload_id}": Case(),
    "PATCH /tenant/v1/users/{user_id}": Case({"role": "viewer"}, IF_MATCH),
    "DELETE /tenant/v1/users/{user_id}": Case(),
    "GET /tenant/v1/webhooks/{webhook_id}": Case(),
    "PATCH /tenant/v1/webhooks/{webhook_id}": Case({"events": ["adapter.ready"]}, IF_MATCH),
    "POST /tenant/v1/webhooks/{webhook_id}/rotate": Case(),
    "GET /tenant/v1/webhooks/{webhook_id}/deliveries": Case(),
    "POST /tenant/v1/webhooks/{webhook_id}/deliveries/{delivery_id}/replay": Case(),
    "DELETE /tenant/v1/webhooks/{webhook_id}/deliveries/{delivery_id}": Case(),
    "DELETE /tenant/v1/webhooks/{webhook_id}": Case(),
    "DELETE /tenant/v1/keys/{key_id}": Case(),
    "DELETE /tenant/v1/adapters/{name}/aliases/{alias}": Case(),
    "DELETE /tenant/v1/adapters/{name}/versions/{version}": Case(),
    "DELETE /tenant/v1/adapters/{name}": Case(),
    "GET /operator/v1/tenants/{tenant_id}": Case(),
    "GET /operator/v1/tenants/{tenant_id}/quotas": Case(),
    "PATCH /operator/v1/tenants/{tenant_id}/quotas": Case({}, IF_MATCH),
    "PATCH /operator/v1/tenants/{tenant_id}/tier": Case({}, IF_MATCH),
    "GET /operator/v1/tenants/{tenant_id}/billing": Case(),
    "PATCH /operator/v1/tenants/{tenant_id}/billing": Case({}, IF_MATCH),
    "GET /tenant/v1/billing/invoices/{invoice_id}": Case(),
    "GET /operator/v1/invoices/{invoice_id}": Case(),
    "POST /operator/v1/invoices/{invoice_id}/paid": Case({"reference": "SEPA 1"}),
    "POST /operator/v1/invoices/{invoice_id}/void": Case(),
    "GET /operator/v1/tenants/{tenant_id}/credits": Case(),
    "POST /operator/v1/tenants/{tenant_id}/credits": Case({"amount_micro": 5, "reason": "welcome"}),
    "POST /operator/v1/tenants/{tenant_id}/users": Case({"email": "new@example.com"}),
    "POST /operator/v1/tenants/{tenant_id}/suspend": Case(),
    "POST /operator/v1/tenants/{tenant_id}/resume": Case(),
    "DELETE /operator/v1/tenants/{tenant_id}": Case(),
}


@dataclass
class World:
    """Tenant A's ids by the names of path parameters, and keys that may do everything: of A, of B, and an operator's."""

    ids: dict[str, str]
    owner: str
    other_tenant: str
    operator: str


async def make_world(gateway: Gateway, database: Database) -> World:
    owner = await gateway.tenant("owner", (TENANT_ADMIN,))
    other_tenant = await gateway.tenant("stranger", (TENANT_ADMIN,))
    await gateway.adapter("owner", "support", DIGEST)
    async with database.as_operator() as session:
        operator = (await KeyRepository(session).create(None, "operator", ["operator"])).plaintext
        found = await KeyRepository(session).find(owner.split("_")[2])
        assert found is not None and found.tenant_id is not None
        key = (await KeyRepository(session).create(found.tenant_id, "target", ["inference"])).record.key_id
    refused = Explanation(request_id="req-77", at=datetime.now(UTC), decisions=())
    gateway.admissions.explanations[found.tenant_id, "req-77"] = refused
    finished = Used(
        None, found.api_key_id, datetime.now(UTC), client_request_id="req-77", phases={"prefill": [1, 2]}
    )
    settle(database.url, UsingTenant(found.tenant_id, "owner", {}, {}), [finished])
    ids = {
        "request_id": "req-77",
        "key_id": key,
        "name": "support",
        "name:path": "support",
        "version": "1",
        "alias": "production",
    }
    async with database.as_tenant(found.tenant_id) as session:
        files = [DeclaredFile(**file) for file in declared(FILES)]
        terms = UploadTerms(part_bytes=1000, lifetime=timedelta(hours=1), max_open=9)
        upload = await UploadRepository(session, found.tenant_id).open("support", files, terms, None)
    ids |= {"tenant_id": str(found.tenant_id), "upload_id": str(upload.id), "file": CONFIG, "number": "1"}
    webhook_id = await add_webhook(database, found.tenant_id)
    await add_event(database, found.tenant_id)
    ids |= {"webhook_id": str(webhook_id), "delivery_id": str(await dispatched(database, webhook_id))}
    ids["invoice_id"] = await draft_invoice(database, found.tenant_id)
    ids["user_id"] = str(await add_person(database, "mara@example.com", roles={found.tenant_id: "viewer"}))
    ids["evaluation_id"] = str(await add_evaluation(database, found.tenant_id, "support"))
    return World(ids, owner, other_tenant, operator)


async def ask(client: httpx.AsyncClient, route: str, ids: Mapping[str, str], key: str) -> httpx.Response:
    method, _, path = route.partition(" ")
    filled = re.sub(r"\{([^}]+)\}", lambda match: ids[match[1]], path)
    case = CASES[route]
    headers = {"authorization": f"Bearer {key}", **case.headers}
    body: dict[str, Any] = {"json": case.body} if case.content is None else {"content": case.content}
    if case.files is not None:
        body = {"files": {name: ("file", content) for name, content in case.files.items()}}
    return await client.request(method, filled, headers=headers, **body)


def words(response: httpx.Response, ids: Mapping[str, str]) -> tuple[int, str]:
    """Status and body, whatever ids it repeats."""
    text = response.text
    for name, value in sorted(ids.items(), key=lambda item: -len(item[1])):
        text = re.sub(rf"(?<![0-9A-Za-z]){re.escape(value)}(?![0-9A-Za-z])", name.partition(":")[0], text)
    return response.status_code, text


async def test_resources_of_another_tenant_do_not_exist(start_gateway: Any, database: Database) -> None:
    gateway = await start_gateway()
    with_ids = {route for route in routes_of(gateway.app) if "{" in route}
    assert with_ids - OF_NO_TENANT == CASES.keys()
    world = await make_world(gateway, database)
    async with in_process(gateway.app) as client:
        for route in CASES:
            status = 403 if SCOPES[route] == OPERATOR else 404
            swapped = await ask(client, route, world.ids, world.other_tenant)
            unknown = await ask(client, route, UNKNOWN, world.other_tenant)
            assert swapped.status_code == status, (route, swapped.text)
            assert words(swapped, world.ids) == words(unknown, UNKNOWN), route
        # That the ids are real is what makes the above a test: their owner, or the operator, finds them all.
        for route in CASES:
            key = world.operator if SCOPES[route] == OPERATOR else world.owner
            own = await ask(client, route, world.ids, key)
            assert own.status_code in FOUND, (route, own.text)
