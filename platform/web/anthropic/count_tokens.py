"""`/v1/messages/count_tokens`: the tokens of the prompt that `/v1/messages` would make of a body."""

from typing import Annotated

from fastapi import APIRouter, Request
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Caller
from loraplex.platform.errors import InvalidParameter
from loraplex.platform.parameters.messages_request import CountTokensRequest
from loraplex.platform.parameters.parameter_table import read_parameters
from loraplex.platform.web.anthropic.openapi import described, responses
from loraplex.platform.web.anthropic.request_reading import NAMES, read_request
from loraplex.platform.web.anthropic.response_models import InputTokens
from loraplex.platform.web.inference_plane import (
    json_response,
    plane_of,
    rename_parameter,
    requires_inference,
)
from loraplex.platform.web.transport.body_budget import body_lease

router = APIRouter()


@router.post(
    "/messages/count_tokens",
    responses=responses(InputTokens, streams=False),
    openapi_extra=described(CountTokensRequest),
)
async def count_tokens(request: Request, caller: Annotated[Caller, requires_inference()]) -> Response:
    plane = plane_of(request)
    try:
        with body_lease(request) as lease:
            body = await plane.read_body(
                request, caller, lambda given: read_parameters("count_tokens", given), lease
            )
            values = read_request(body, plane.dialect_context(request, caller))
            found = await plane.read_model(request, caller, values.model)
            async with plane.tokenizing.slot(caller.tenant_id):
                values = values.with_defaults(found.defaults)
                [ids] = await plane.pipeline.prompt_ids(values, found, caller.tenant_id)
    except InvalidParameter as error:
        rename_parameter(error, NAMES)
        raise
    return json_response(InputTokens(input_tokens=len(ids)).model_dump_json().encode())
