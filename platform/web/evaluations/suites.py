"""Receives suites, and reads them back: of a tenant, of the installation, and the built-in one."""

import asyncio
import hashlib
from functools import cache
from typing import Any, Final
from uuid import UUID, uuid4

from loraplex.platform.errors import InvalidParameter
from loraplex.platform.evaluations.conformance import NAME, conformance_suite
from loraplex.platform.evaluations.suite import MAX_SUITE_BYTES, SuiteSummary, parse_suite
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.parameters.json_object import BodyLimits
from loraplex.platform.web.console.form_routes import FormSubmission
from loraplex.platform.web.console.page import PageRequest
from loraplex.platform.web.cursors import MAX_FILTER_LENGTH, query_parameter, read_query
from loraplex.platform.web.openapi import described
from loraplex.platform.web.planes import OperatorRequest, TenantRequest
from loraplex.platform.web.transport.body_budget import body_lease
from loraplex.platform.web.transport.request_body import read_bytes
from loraplex.tenants.evaluations import queries
from loraplex.tenants.evaluations.encrypted_contents import NO_TENANT, EncryptedContents
from loraplex.tenants.evaluations.records import FoundSuite
from loraplex.tenants.evaluations.use_cases import NewEvaluation, NewSuite

LIMITS: Final = BodyLimits(max_bytes=MAX_SUITE_BYTES, body_s=300.0)
BINARY: Final = "application/octet-stream"
QUERY: Final = {
    "name": "What the suite is called from now on.",
    "base": "The digest of the base model that its cases are for; absent: any.",
}


def suite_body() -> dict[str, Any]:
    """Build the `openapi_extra` of a route that receives a suite."""
    text = {"type": "string", "minLength": 1, "maxLength": MAX_FILTER_LENGTH}
    parameters = [
        query_parameter(name, meaning, text, required=name == "name") for name, meaning in QUERY.items()
    ]
    extra = described(repeatable=True)
    # Generators of clients know no type of JSONL; a request may have any.
    content = {BINARY: {"schema": {"type": "string", "format": "binary"}}}
    body = {"required": True, "content": content}
    return {"parameters": [*parameters, *extra["parameters"]], "requestBody": body}


async def receive_suite(request: TenantRequest | OperatorRequest, tenant_id: UUID | None) -> NewSuite:
    """Read and check the file of a request, and encrypt it. Raises `SuiteInvalid`, and what reading query and body raises."""
    given = read_query(request.http, QUERY)
    if "name" not in given:
        raise InvalidParameter("The query needs a `name`, as in `?name=support`.", param="name")
    with body_lease(request.http) as lease:
        content = await read_bytes(request.http, LIMITS, lease)
        request.http.state.body_sha256 = hashlib.sha256(
            repr(sorted(given.items())).encode() + content
        ).digest()
        return await checked_suite(request.dependencies, tenant_id, given["name"], content, given.get("base"))


async def checked_suite(
    dependencies: GatewayDependencies, tenant_id: UUID | None, name: str, content: bytes, base: str | None
) -> NewSuite:
    """Check a file in a worker process, and encrypt it. Raises `SuiteInvalid`, `InvalidParameter` for a name that is taken."""
    refuse_built_in(name)
    summary = await dependencies.suite_checks.check(
        dependencies.namespace_of(tenant_id or NO_TENANT), content
    )
    return await new_suite(dependencies, tenant_id, name, summary, content, base)


def refuse_built_in(name: str) -> None:
    """Raise `InvalidParameter` for the name that a suite may not have."""
    if name == NAME:
        raise InvalidParameter(f"`name` {NAME!r} is the built-in suite; give another one.", param="name")


async def new_suite(
    dependencies: GatewayDependencies,
    tenant_id: UUID | None,
    name: str,
    summary: SuiteSummary,
    content: bytes,
    base: str | None,
) -> NewSuite:
    """Encrypt a checked file."""
    identity = uuid4()
    encrypted = await asyncio.to_thread(contents_of(dependencies).encrypt, tenant_id, identity, content)
    return NewSuite(
        id=identity,
        name=name,
        sha256=summary.sha256,
        cases=summary.cases,
        size_bytes=len(content),
        content=encrypted,
        base_digest=base,
    )


async def suite_bytes(request: TenantRequest, name: str) -> bytes:
    """Return the file of a suite. Raises `SuiteNotFound`, `ContentUnreadable`."""
    if name == NAME:
        return conformance_suite()
    row, encrypted = await request.query(queries.suite_content, request.tenant_id, name)
    return await asyncio.to_thread(
        contents_of(request.dependencies).decrypt, row.tenant_id, row.id, encrypted
    )


async def report_text(request: TenantRequest | PageRequest, evaluation_id: UUID) -> bytes:
    """Return the JSON text of a report. Raises `EvaluationNotFound`, `ContentUnreadable`."""
    found, encrypted = await request.query(queries.report, request.tenant_id, evaluation_id)
    decrypt = contents_of(request.dependencies).decrypt
    return await asyncio.to_thread(decrypt, request.tenant_id, found.id, encrypted)


async def new_evaluation(
    request: TenantRequest | FormSubmission,
    version: int,
    suite: str,
    baseline: int | str | None,
    **asked: Any,
) -> NewEvaluation:
    """Return an evaluation on a suite of this name, against the served base model. Raises `SuiteNotFound`."""
    dependencies = request.dependencies
    return NewEvaluation(
        version=version,
        suite=await request.query(queries.find_suite, request.tenant_id, suite, built_in()),
        baseline=baseline,
        base_digest=dependencies.engine.info().model_digest,
        base_model=dependencies.served_model_name,
        **asked,
    )


def contents_of(dependencies: GatewayDependencies) -> EncryptedContents:
    """Return what encrypts suites and reports of this installation."""
    return EncryptedContents(dependencies.derive_key)


@cache
def built_in() -> FoundSuite:
    """Return the built-in suite."""
    suite = parse_suite(conformance_suite())
    return FoundSuite(NAME, suite.sha256, len(suite.cases))
