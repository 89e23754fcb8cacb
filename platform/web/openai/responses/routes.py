"""`/v1/responses`, and `/v1/responses/input_tokens`, which counts the tokens of its prompt."""

from typing import Annotated, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Caller
from loraplex.platform.parameters.responses_request import InputTokensRequest, ResponsesRequest
from loraplex.platform.parameters.unsupported_tools import HEADER_PARAMETER
from loraplex.platform.web.inference_plane import Dialect, json_response, plane_of, requires_inference
from loraplex.platform.web.openai.openapi import generation_responses
from loraplex.platform.web.openai.response_models import encoded
from loraplex.platform.web.openai.responses.events import respond
from loraplex.platform.web.openai.responses.models import InputTokenCount, ResponseEvent, ResponseObject
from loraplex.platform.web.openai.responses.reader import NAMES, read_conversation, read_responses
from loraplex.platform.web.openapi import referred_body
from loraplex.platform.web.request_timeout import TIMEOUT_PARAMETER
from loraplex.platform.web.responses import documented

DIALECT: Final = Dialect(
    operation="chat", body=ResponsesRequest, read=read_responses, respond=respond, names=NAMES
)

router = APIRouter()


@router.post(
    "/responses",
    responses=generation_responses(ResponseObject, ResponseEvent),
    openapi_extra=referred_body(ResponsesRequest, HEADER_PARAMETER, TIMEOUT_PARAMETER),
)
async def responses(request: Request, caller: Annotated[Caller, requires_inference(cached=True)]) -> Response:
    return await plane_of(request).generate(request, caller, DIALECT)


@router.post(
    "/responses/input_tokens",
    responses=documented(response=InputTokenCount),
    openapi_extra=referred_body(InputTokensRequest, HEADER_PARAMETER),
)
async def input_tokens(request: Request, caller: Annotated[Caller, requires_inference()]) -> Response:
    tokens = await plane_of(request).count(request, caller, InputTokensRequest, read_conversation, NAMES)
    return json_response(encoded(InputTokenCount(object="response.input_tokens", input_tokens=tokens)))
