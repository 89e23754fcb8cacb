"""`/tenant/v1/data-policy`, and suites made of the requests that it has recorded."""

import asyncio
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from loraplex.platform.evaluations.suite import MAX_CASES, MAX_SUITE_BYTES
from loraplex.platform.web.adapters.routes import Writer
from loraplex.platform.web.evaluations.suites import contents_of, new_suite, refuse_built_in
from loraplex.platform.web.openapi import described
from loraplex.platform.web.planes import TenantRequest, requires
from loraplex.platform.web.request_bodies import RequestModel, request_model
from loraplex.platform.web.responses import documented, reply_with
from loraplex.platform.web.transport.body_budget import body_lease
from loraplex.tenants.evaluations.records import SuiteDocument
from loraplex.tenants.evaluations.use_cases import NewSuite, add_suite
from loraplex.tenants.names import ADAPTER_NAME
from loraplex.tenants.recordings import queries, use_cases
from loraplex.tenants.recordings.queries import FoundRequest
from loraplex.tenants.recordings.records import DataPolicyDocument, RecordRequests
from loraplex.tenants.scopes import TENANT_ADMIN

Anyone = Annotated[TenantRequest, requires(None)]
Admin = Annotated[TenantRequest, requires(TENANT_ADMIN)]
Name = Annotated[str, Field(pattern=ADAPTER_NAME)]

router = APIRouter()


class DataPolicyBody(RequestModel):
    """`record_requests` null: no request is recorded, and those that are kept are deleted."""

    record_requests: RecordRequests | None


class RecordedSuiteBody(RequestModel):
    """The newest `limit` recorded requests, of one adapter if it is named."""

    name: Name
    limit: int = Field(default=100, ge=1, le=MAX_CASES)
    adapter: Name | None = None


class RecordedSuiteDocument(SuiteDocument):
    """`left_out`: requests that became no case: of another base model, beyond the size of a suite, or refused by its checks."""

    left_out: int


@router.get("/data-policy", responses=documented(response=DataPolicyDocument))
async def get_data_policy(request: Anyone) -> Response:
    """Say what is kept of this tenant's requests, to any of its keys."""
    return await request.read(queries.data_policy, request.tenant_id)


@router.put(
    "/data-policy",
    responses=documented(412, 428, response=DataPolicyDocument),
    openapi_extra=described(DataPolicyBody, if_match=True),
)
async def put_data_policy(
    request: Admin, body: Annotated[DataPolicyBody, request_model(DataPolicyBody)]
) -> Response:
    """Have chat completions recorded, encrypted; gateways learn of it within 5 s. Null deletes what is recorded at once."""
    rules, seen = body.record_requests, request.if_match
    return await request.run(use_cases.set_data_policy, request.tenant_id, rules, seen)


@router.post(
    "/suites/from-requests",
    status_code=201,
    responses=documented(409, 422, response=RecordedSuiteDocument, status=201),
    openapi_extra=described(RecordedSuiteBody, repeatable=True),
)
async def create_suite_from_requests(
    request: Writer, body: Annotated[RecordedSuiteBody, request_model(RecordedSuiteBody)]
) -> Response:
    """Make a suite of recorded requests, the newest first, that expects what was answered."""
    refuse_built_in(body.name)
    found = await request.query(queries.recorded_requests, request.tenant_id, body.adapter, body.limit)
    base = request.dependencies.engine.info().model_digest
    new = await _suite(request, body.name, base, [each for each in found if each.base_digest == base])
    left_out = len(found) - new.cases
    return await request.replying(
        lambda made: reply_with(RecordedSuiteDocument(left_out=left_out, **made.model_dump()), 201)
    ).run(add_suite, request.tenant_id, new)


async def _suite(request: TenantRequest, name: str, base: str, found: Sequence[FoundRequest]) -> NewSuite:
    """Make and encrypt a suite of recorded requests. Raises `SuiteInvalid`, `ContentUnreadable`."""
    dependencies, tenant_id = request.dependencies, request.tenant_id
    decrypt, recordings, size = contents_of(dependencies).decrypt, list[bytes](), 0
    with body_lease(request.http) as lease:
        for each in found:
            content = await asyncio.to_thread(decrypt, tenant_id, each.id, each.content)
            size += len(content)
            if size > MAX_SUITE_BYTES:
                break
            lease.grow(len(content))
            recordings.append(content)
        made = await dependencies.suite_checks.make(dependencies.namespace_of(tenant_id), recordings)
    return await new_suite(dependencies, tenant_id, name, made.summary, made.content, base)
