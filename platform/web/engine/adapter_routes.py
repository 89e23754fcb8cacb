"""`GET /operator/v1/engine/adapters`: the adapters with the slowest first tokens, the most errors, requests or tokens lately."""

from datetime import timedelta
from typing import Annotated, Final

from fastapi import APIRouter
from starlette.responses import Response

from loraplex.platform.errors import InvalidParameter
from loraplex.platform.web.openapi import listed
from loraplex.platform.web.planes import OperatorRequest, requires_operator
from loraplex.platform.web.sorting import BY_ID
from loraplex.tenants.ledger.queries import ADAPTER_ORDERS, BusyAdapter, busiest_adapters

DEFAULT_MINUTES: Final = 15
MAX_MINUTES: Final = 1440
PARAMETERS: Final = {
    "sort": f"What is largest first: {', '.join(f'`{each}`' for each in ADAPTER_ORDERS)}. Default: `ttft`, the 95th percentile.",
    "minutes": f"Of requests admitted so lately: 1 to {MAX_MINUTES}, default {DEFAULT_MINUTES}.",
}
Operator = Annotated[OperatorRequest, requires_operator()]

router = APIRouter()


@router.get("/engine/adapters", **listed(BusyAdapter, PARAMETERS))
async def list_busiest(request: Operator) -> Response:
    page = request.page(BY_ID, PARAMETERS)
    order, minutes = page.filters.get("sort", "ttft"), page.filters.get("minutes", str(DEFAULT_MINUTES))
    if order not in ADAPTER_ORDERS:
        raise InvalidParameter(f"`sort` must be one of {', '.join(ADAPTER_ORDERS)}.", param="sort")
    if not (minutes.isascii() and minutes.isdecimal() and 1 <= int(minutes) <= MAX_MINUTES):
        raise InvalidParameter(f"`minutes` must be a number from 1 to {MAX_MINUTES}.", param="minutes")
    return await request.listing(page, busiest_adapters, order, timedelta(minutes=int(minutes)), page.limit)
