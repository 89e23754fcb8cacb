"""`/tenant/v1/suites` and evaluations of versions. A suite or evaluation of another tenant is 404."""

from typing import Annotated, Any, Final
from uuid import UUID

from fastapi import APIRouter
from pydantic import Field, WithJsonSchema
from starlette.responses import Response

from loraplex.platform.auth.authenticator import check_scope
from loraplex.platform.web.adapters.routes import Reader, Writer
from loraplex.platform.web.adapters.version_routes import VERSION, Version
from loraplex.platform.web.evaluations.suites import (
    BINARY,
    built_in,
    new_evaluation,
    receive_suite,
    report_text,
    suite_body,
    suite_bytes,
)
from loraplex.platform.web.openapi import described, listed
from loraplex.platform.web.path_ids import PathId
from loraplex.platform.web.request_bodies import RequestModel, request_model
from loraplex.platform.web.responses import documented
from loraplex.platform.web.sorting import BY_ID, SortOrder, by_text
from loraplex.tenants.errors import EvaluationNotFound
from loraplex.tenants.evaluations import queries, use_cases
from loraplex.tenants.evaluations.records import (
    MAX_SEED,
    EvaluationDocument,
    GateDocument,
    SuiteDocument,
)
from loraplex.tenants.names import ADAPTER_NAME
from loraplex.tenants.registry.records import MAX_VERSION
from loraplex.tenants.scopes import INFERENCE

SUITE: Final = "/suites/{name}"
EVALUATION: Final = "/evaluations/{evaluation_id}"
GATE: Final = "/adapters/{name}/aliases/{alias}/gate"
BY_NAME: Final[SortOrder[SuiteDocument, str]] = by_text(lambda suite: suite.name)
EvaluationId = Annotated[UUID, PathId(EvaluationNotFound, "no such evaluation")]
SuiteName = Annotated[str, Field(pattern=ADAPTER_NAME)]
REPORT: Final[dict[int | str, dict[str, Any]]] = documented()
REPORT[200] = {"description": "The report.", "content": {"application/json": {"schema": {"type": "object"}}}}
CONTENT: Final = {
    **REPORT,
    200: {
        "description": "The file.",
        "content": {BINARY: {"schema": {"type": "string", "format": "binary"}}},
    },
}

router = APIRouter()


class NewEvaluationBody(RequestModel):
    """`suite`: a suite's name, or `conformance`. `baseline`: a version's number, an alias of the adapter, or `base`, the base model."""

    suite: SuiteName
    baseline: Annotated[
        int | str | None,
        WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]}),
    ] = None
    seed: int = Field(default=0, ge=0, le=MAX_SEED)


class GateBody(RequestModel):
    """`min_pass`: the least pass rate. `max_regression`: by how much it may be below that of the version the alias points to."""

    suite: SuiteName
    min_pass: float = Field(ge=0, le=1)
    max_regression: float | None = Field(default=None, ge=0, le=1)


@router.get("/suites", **listed(SuiteDocument))
async def list_suites(request: Reader) -> Response:
    """List the tenant's suites and the installation's by name."""
    page = request.page(BY_NAME)
    return await request.listing(page, queries.suites, request.tenant_id, page)


@router.post(
    "/suites",
    status_code=201,
    responses=documented(409, 422, response=SuiteDocument, status=201),
    openapi_extra=suite_body(),
)
async def create_suite(request: Writer) -> Response:
    """Store a JSONL file of cases under the query's `name`. The same file under the same name is there already."""
    new = await receive_suite(request, request.tenant_id)
    return await request.run(use_cases.add_suite, request.tenant_id, new)


@router.get(SUITE, responses=documented(response=SuiteDocument))
async def get_suite(request: Reader, name: str) -> Response:
    return await request.read(queries.suite, request.tenant_id, name)


@router.get(f"{SUITE}/content", responses=CONTENT)
async def get_suite_content(request: Reader, name: str) -> Response:
    """Return the file as it was stored; that of `conformance`, too."""
    return Response(await suite_bytes(request, name), media_type=BINARY)


@router.delete(SUITE, status_code=204, responses=documented(409))
async def delete_suite(request: Writer, name: str) -> Response:
    """Delete a suite; reports on it stay. Refused while a gate or an open evaluation needs it."""
    return await request.run(use_cases.delete_suite, request.tenant_id, name)


@router.post(
    f"{VERSION}/evaluations",
    status_code=202,
    responses=documented(409, 422, response=EvaluationDocument, status=202),
    openapi_extra=described(NewEvaluationBody, repeatable=True),
)
async def start_evaluation(
    request: Writer,
    name: str,
    version: Version,
    body: Annotated[NewEvaluationBody, request_model(NewEvaluationBody)],
) -> Response:
    """Queue an evaluation. Its requests are this key's, which needs `inference`: they are charged and limited as any."""
    check_scope(request.caller, INFERENCE)
    asked = {"seed": body.seed, "key_id": request.caller.key_id, "address": request.caller.address}
    new = await new_evaluation(request, min(version, MAX_VERSION), body.suite, body.baseline, **asked)
    return await request.run(use_cases.start, request.tenant_id, name, new)


@router.get(f"{VERSION}/evaluations", **listed(EvaluationDocument))
async def list_evaluations(request: Reader, name: str, version: Version) -> Response:
    """List the evaluations of a version, newest first."""
    page = request.page(BY_ID)
    return await request.listing(page, queries.evaluations, request.tenant_id, name, version, page)


@router.get(EVALUATION, responses=documented(response=EvaluationDocument))
async def get_evaluation(request: Reader, evaluation_id: EvaluationId) -> Response:
    return await request.read(queries.evaluation, request.tenant_id, evaluation_id)


@router.get(f"{EVALUATION}/report", responses=REPORT)
async def get_report(request: Reader, evaluation_id: EvaluationId) -> Response:
    """Return the report: the same bytes for the same suite, version, engine, seed and answers."""
    content = await report_text(request, evaluation_id)
    return Response(content, media_type="application/json")


@router.post(f"{EVALUATION}/cancel", responses=documented(409, response=EvaluationDocument))
async def cancel_evaluation(request: Writer, evaluation_id: EvaluationId) -> Response:
    return await request.run(use_cases.cancel, request.tenant_id, evaluation_id)


@router.get(GATE, responses=documented(response=GateDocument))
async def get_gate(request: Reader, name: str, alias: str) -> Response:
    return await request.read(queries.gate, request.tenant_id, name, alias)


@router.put(GATE, responses=documented(409, response=GateDocument), openapi_extra=described(GateBody))
async def put_gate(
    request: Writer, name: str, alias: str, body: Annotated[GateBody, request_model(GateBody)]
) -> Response:
    """Set the gate of an alias: it moves to a new version only with a report on `suite` that keeps both bounds."""
    suite = await request.query(queries.find_suite, request.tenant_id, body.suite, built_in())
    bounds = (body.min_pass, body.max_regression)
    where = (request.tenant_id, name, alias, suite)
    return await request.run(use_cases.set_gate, *where, *bounds, scopes=request.caller.scopes)


@router.delete(GATE, status_code=204, responses=documented())
async def delete_gate(request: Writer, name: str, alias: str) -> Response:
    scopes = request.caller.scopes
    return await request.run(use_cases.delete_gate, request.tenant_id, name, alias, scopes=scopes)
