"""The OpenAPI document against the running application (schemathesis): no 5xx, no status, header or body it does not tell.

A few examples of every operation in each run; `--contract-examples 300` is the long form.
"""

import asyncio
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.platform.web.evaluations.stored_evaluation import add_evaluation, add_gate, add_shared_suite
from tests.platform.web.gateway import BASE_MODEL, Gateway, start_gateway
from tests.platform.web.invoices.drafted_invoice import draft_invoice
from tests.platform.web.route_table import routes_of
from tests.platform.web.upload_server import CONFIG, WEIGHTS, declared
from tests.tenants.ledger.stored_usage import Used, UsingTenant, settle
from tests.tenants.people.people_world import add_person
from tests.tenants.webhooks.webhooks import add_event, add_webhook, dispatched, end

from loraplex.platform.inference.decisions.wording import FORMAT
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.counters.counter_replies import Explanation
from loraplex.tenants.database import Database
from loraplex.tenants.models import DecisionCalibration
from loraplex.tenants.registry.uploads import DeclaredFile, UploadRepository, UploadTerms
from loraplex.tenants.scopes import TENANT_ADMIN

__all__ = ["start_gateway"]

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
DIGEST = "a" * 64
REQUEST_ID = "req-77"
FILES = {CONFIG: b"{}", WEIGHTS: b"weights"}
GENERATIONS = {"POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses"}
"""Operations whose bodies name the base model: of `BODIES` of them, the engine must get some."""
BODIES = 10
EVALUATED = re.compile("/suites/|/evaluations/|/gate$")
TERMS = UploadTerms(part_bytes=1000, lifetime=timedelta(hours=1), max_open=100)


@dataclass(frozen=True)
class Known:
    """A key for each plane, and by operation what its path parameters are called where they lead somewhere."""

    keys: Mapping[str, str]
    ids: Mapping[str, Mapping[str, str]]

    def headers(self, path: str) -> dict[str, str]:
        plane = "operator" if path.startswith("/operator/") else "tenant"
        return {"authorization": f"Bearer {self.keys[plane]}"}


async def make_known(gateway: Gateway, database: Database, document: Mapping[str, Any]) -> Known:
    """Every operation has things of its own, since another operation may delete them; the calling key stays."""
    admin = await gateway.tenant("asking", (TENANT_ADMIN,))
    async with database.as_operator() as session:
        operator = (await KeyRepository(session).create(None, "operator", ["operator"])).plaintext
        asking = (await TenantRepository(session).get("asking")).id
    refused = Explanation(request_id=REQUEST_ID, at=datetime.now(UTC), decisions=())
    gateway.admissions.explanations[asking, REQUEST_ID] = refused
    finished = Used(
        None, uuid4(), datetime.now(UTC), client_request_id=REQUEST_ID, phases={"prefill": [1, 2]}
    )
    settle(database.url, UsingTenant(asking, "asking", {}, {}), [finished])
    async with database.as_operator() as session:
        found = DecisionCalibration(
            tenant_id=asking,
            digest=DIGEST,
            system_fingerprint=gateway.engine.info().system_fingerprint,
            format=FORMAT,
            read="labels",
            temperatures={"choice": 1.5},
            report={},
            sha256=DIGEST,
        )
        session.add(found)
    with_ids = (
        (method.upper(), path)
        for path, item in document["paths"].items()
        for method in item
        if "{" in path and not path.startswith("/v1/")
    )
    ids = {
        f"{method} {path}": await make_ids(gateway, database, asking, f"of-{number}")
        | (await make_webhook(database, asking) if "{webhook_id}" in path else {})
        | (await make_member(database, asking, number) if "{user_id}" in path else {})
        | (await make_evaluation(database, asking, f"of-{number}") if EVALUATED.search(path) else {})
        for number, (method, path) in enumerate(with_ids)
    }
    return Known({"tenant": admin, "operator": operator}, ids)


async def make_ids(gateway: Gateway, database: Database, asking: UUID, name: str) -> dict[str, str]:
    """An adapter in production with an upload that only waits to be completed, a key and a tenant, all called `name`."""
    await gateway.adapter("asking", name, DIGEST)
    async with database.as_operator() as session:
        asked = (await TenantRepository(session).create(name)).id
        key = (await KeyRepository(session).create(asking, name, ["inference"])).record.key_id
        uploads = UploadRepository(session, asking)
        files = [DeclaredFile(**file) for file in declared(FILES)]
        upload = (await uploads.open(name, files, TERMS, None)).id
    invoice_id = await draft_invoice(database, asking)
    ids = {"name": name, "version": "1", "alias": "production", "key_id": key, "tenant_id": str(asked)}
    ids |= {"invoice_id": invoice_id}
    return {**ids, "request_id": REQUEST_ID, "upload_id": str(upload), "file": CONFIG, "number": "1"}


async def make_webhook(database: Database, asking: UUID) -> dict[str, str]:
    """A webhook with a delivery that has ended. A tenant may have few, so only the operations on webhooks get one."""
    webhook_id = await add_webhook(database, asking)
    await add_event(database, asking)
    delivery_id = await dispatched(database, webhook_id)
    await end(database, delivery_id, "dead")
    return {"webhook_id": str(webhook_id), "delivery_id": str(delivery_id)}


async def make_member(database: Database, asking: UUID, number: int) -> dict[str, str]:
    """A member, next to another admin who may not be removed."""
    await add_person(database, f"admin-{number}@example.com", roles={asking: "admin"})
    return {"user_id": str(await add_person(database, f"eve-{number}@example.com", roles={asking: "viewer"}))}


async def make_evaluation(database: Database, asking: UUID, name: str) -> dict[str, str]:
    """A suite, an evaluation and a gate of the adapter `name`, called as that is, and a suite of the installation."""
    await add_shared_suite(database, name)
    await add_gate(database, asking, name)
    return {"evaluation_id": str(await add_evaluation(database, asking, name))}


def cases(operation: Any) -> st.SearchStrategy[Case[Any]]:
    """Requests as the document asks for, and others where it asks for anything."""
    modes = [GenerationMode.POSITIVE]
    if operation.body or operation.query or operation.headers:
        modes.append(GenerationMode.NEGATIVE)
    return st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in modes))


def examine(url: str, document: dict[str, Any], known: Known, examples: int) -> list[str]:
    """What does not agree, one text per operation."""
    schema = schemathesis.openapi.from_dict(document)
    session = requests.Session()
    seen: defaultdict[str, set[int]] = defaultdict(set)

    def check_operation(operation: Any, ids: Mapping[str, str], count: int) -> None:
        generates = operation.label in GENERATIONS

        @settings(
            max_examples=count,
            database=None,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases(operation))
        def check(case: Case[Any]) -> None:
            for name in case.path_parameters if ids else ():
                case.path_parameters[name] = ids[name]
            if ids and "If-Match" in case.headers:
                case.headers["If-Match"] = '"1"'
            if generates and isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = BASE_MODEL
            if ids and isinstance(case.body, dict) and "suite" in case.body:
                case.body["suite"] = "conformance"
            headers = known.headers(case.operation.path)
            response = case.call(base_url=url, session=session, headers=headers, timeout=120)
            if ids or generates:
                seen[operation.label].add(response.status_code)
            case.validate_response(response, checks=CHECKS)

        check()

    failures = []
    results: Iterable[Any] = schema.get_all_operations()
    for result in results:
        operation = result.ok()
        ids = known.ids.get(operation.label, {})
        try:
            check_operation(
                operation, ids, max(examples, BODIES) if operation.label in GENERATIONS else examples
            )
            if ids:
                check_operation(operation, {}, 1)
        except FailureGroup as error:
            failures.append(f"{operation.label}: {error}"[:1500])
    failures += [f"{label}: never 200" for label in GENERATIONS if 200 not in seen[label]]
    # A first request with real ids finds them: what follows it may meet their end.
    return failures + [f"{label}: only 404" for label, statuses in seen.items() if statuses == {404}]


async def test_the_planes_conform_to_their_openapi_document(
    start_gateway: Any, database: Database, request: pytest.FixtureRequest
) -> None:
    gateway = await start_gateway()
    document = gateway.app.openapi()
    known = await make_known(gateway, database, document)
    documented = {f"{method.upper()} {path}" for path, item in document["paths"].items() for method in item}
    assert documented == {route.replace(":path}", "}") for route in routes_of(gateway.app)}
    examples = request.config.getoption("--contract-examples")
    failures = await asyncio.to_thread(examine, gateway.url, document, known, examples)
    assert not failures, "\n\n".join(failures)
