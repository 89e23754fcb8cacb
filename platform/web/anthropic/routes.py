"""`/v1/messages`, and `/v1/messages/count_tokens`, which counts the tokens of its prompt.

Every route asks for the scope `inference`; bodies go through the closed parameter table.
"""

from typing import Annotated, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Caller
from loraplex.platform.parameters.messages_request import CountTokensRequest, MessagesRequest
from loraplex.platform.parameters.unsupported_tools import HEADER_PARAMETER
from loraplex.platform.web.anthropic.message_events import respond
from loraplex.platform.web.anthropic.openapi import responses
from loraplex.platform.web.anthropic.request_reading import NAMES, read_request
from loraplex.platform.web.anthropic.response_models import InputTokens, MessageDocument
from loraplex.platform.web.inference_plane import (
    Dialect,
    generating,
    json_response,
    plane_of,
    requires_inference,
)
from loraplex.platform.web.openapi import referred_body
from loraplex.platform.web.request_timeout import TIMEOUT_PARAMETER
from loraplex.platform.web.transport.direct_routes import DirectRoute

PREFIX: Final = "/v1"
DIALECT: Final = Dialect(
    operation="chat", body=MessagesRequest, read=read_request, respond=respond, names=NAMES
)

router = APIRouter(prefix=PREFIX, tags=["inference"])


@router.post(
    "/messages",
    responses=responses(MessageDocument, streams=True),
    openapi_extra=referred_body(MessagesRequest, HEADER_PARAMETER, TIMEOUT_PARAMETER),
)
async def messages(request: Request, caller: Annotated[Caller, requires_inference(cached=True)]) -> Response:
    return await plane_of(request).generate(request, caller, DIALECT)


@router.post(
    "/messages/count_tokens",
    responses=responses(InputTokens, streams=False),
    openapi_extra=referred_body(CountTokensRequest, HEADER_PARAMETER),
)
async def count_tokens(request: Request, caller: Annotated[Caller, requires_inference()]) -> Response:
    tokens = await plane_of(request).count(request, caller, CountTokensRequest, read_request, NAMES)
    return json_response(InputTokens(input_tokens=tokens).model_dump_json().encode())


DIRECT: Final = {f"{PREFIX}/messages": DirectRoute(messages, generating(DIALECT))}
"""The route that generates, by its path."""
