"""`/operator/v1/suites`: the installation's suites, which every tenant may use. Nobody's adapters are evaluated here."""

from typing import Annotated

from fastapi import APIRouter
from starlette.responses import Response

from loraplex.platform.web.evaluations.routes import BY_NAME, SUITE
from loraplex.platform.web.evaluations.suites import receive_suite, suite_body
from loraplex.platform.web.openapi import listed
from loraplex.platform.web.planes import OperatorRequest, requires_operator
from loraplex.platform.web.responses import documented
from loraplex.tenants.evaluations import queries, use_cases
from loraplex.tenants.evaluations.records import SuiteDocument

Operator = Annotated[OperatorRequest, requires_operator()]

router = APIRouter()


@router.get("/suites", **listed(SuiteDocument))
async def list_suites(request: Operator) -> Response:
    page = request.page(BY_NAME)
    return await request.listing(page, queries.suites, None, page)


@router.post(
    "/suites",
    status_code=201,
    responses=documented(409, 422, response=SuiteDocument, status=201),
    openapi_extra=suite_body(),
)
async def create_suite(request: Operator) -> Response:
    """Store a JSONL file of cases for all tenants."""
    return await request.run(use_cases.add_suite, None, await receive_suite(request, None))


@router.delete(SUITE, status_code=204, responses=documented(409))
async def delete_suite(request: Operator, name: str) -> Response:
    return await request.run(use_cases.delete_suite, None, name)
