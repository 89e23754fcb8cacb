"""The OpenAPI document against the running application (schemathesis): no 5xx, no status, header or body it does not tell.

A few examples of every operation in each run; `--contract-examples 300` is the long form.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

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
from tests.platform.openai.conftest import Gateway, start_gateway
from tests.platform.route_table import routes_of

from loraplex.tenants.accounts import TenantRepository
from loraplex.tenants.database import Database
from loraplex.tenants.keys import KeyRepository
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


@dataclass(frozen=True)
class Known:
    """A key for each plane, and ids that lead somewhere."""

    keys: Mapping[str, str]
    ids: Mapping[str, str]

    def headers(self, path: str) -> dict[str, str]:
        plane = "operator" if path.startswith("/operator/") else "tenant"
        return {"authorization": f"Bearer {self.keys[plane]}"}


async def make_known(gateway: Gateway, database: Database) -> Known:
    """What is asked about may be deleted; whoever asks may not."""
    admin = await gateway.tenant("asking", (TENANT_ADMIN,))
    await gateway.adapter("asking", "support", DIGEST)
    async with database.as_operator() as session:
        keys, tenants = KeyRepository(session), TenantRepository(session)
        operator = (await keys.create(None, "operator", ["operator"])).plaintext
        asking, asked = await tenants.get("asking"), await tenants.create("asked")
        key = (await keys.create(asking.id, "target", ["inference"])).record.key_id
    ids = {"key_id": key, "name": "support", "version": "1", "alias": "production"}
    return Known({"tenant": admin, "operator": operator}, {**ids, "tenant_id": str(asked.id)})


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

    def check_operation(operation: Any) -> None:
        @settings(
            max_examples=examples,
            database=None,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases(operation), real=st.booleans())
        def check(case: Case[Any], real: bool) -> None:
            for name in case.path_parameters if real else ():
                case.path_parameters[name] = known.ids.get(name, str(uuid4()))
            if real and "If-Match" in case.headers:
                case.headers["If-Match"] = '"1"'
            headers = known.headers(case.operation.path)
            response = case.call(base_url=url, session=session, headers=headers, timeout=20)
            case.validate_response(response, checks=CHECKS)

        check()

    failures = []
    results: Iterable[Any] = schema.get_all_operations()
    for result in results:
        operation = result.ok()
        try:
            check_operation(operation)
        except FailureGroup as error:
            failures.append(f"{operation.method.upper()} {operation.path}: {error}"[:1500])
    return failures


async def test_the_planes_do_what_their_document_says(
    start_gateway: Any, database: Database, request: pytest.FixtureRequest
) -> None:
    gateway = await start_gateway()
    known = await make_known(gateway, database)
    document = gateway.app.openapi()
    told = {f"{method.upper()} {path}" for path, item in document["paths"].items() for method in item}
    assert told == {route.replace(":path}", "}") for route in routes_of(gateway.app)}
    examples = request.config.getoption("--contract-examples")
    failures = await asyncio.to_thread(examine, gateway.url, document, known, examples)
    assert not failures, "\n\n".join(failures)
