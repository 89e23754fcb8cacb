"""`/v1/messages/count_tokens`: the tokens of the prompt that `/v1/messages` would make of a body."""

from typing import Annotated

from fastapi import APIRouter, Request
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Caller
from loraplex.platform.parameters.messages_request import CountTokensRequest
from loraplex.platform.web.anthropic.openapi import described, responses
from loraplex.platform.web.anthropic.request_reading import NAMES, read_request
from loraplex.platform.web.anthropic.response_models import InputTokens
from loraplex.platform.web.inference_plane import json_response, plane_of, requires_inference

router = APIRouter()


@router.post(
    "/messages/count_tokens",
    responses=responses(InputTokens, streams=False),
    openapi_extra=described(CountTokensRequest),
)
async def count_tokens(request: Request, caller: Annotated[Caller, requires_inference()]) -> Response:
    tokens = await plane_of(request).count(request, caller, CountTokensRequest, read_request, NAMES)
    return json_response(InputTokens(input_tokens=tokens).model_dump_json().encode())
