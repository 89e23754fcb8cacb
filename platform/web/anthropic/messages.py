"""`/v1/messages`."""

from typing import Annotated, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Caller
from loraplex.platform.parameters.messages_request import MessagesRequest
from loraplex.platform.web.anthropic.message_events import respond
from loraplex.platform.web.anthropic.openapi import described, responses
from loraplex.platform.web.anthropic.request_reading import NAMES, read_request
from loraplex.platform.web.anthropic.response_models import MessageDocument
from loraplex.platform.web.inference_plane import Dialect, plane_of, requires_inference
from loraplex.platform.web.request_timeout import TIMEOUT_PARAMETER

DIALECT: Final = Dialect(
    operation="chat", body=MessagesRequest, read=read_request, respond=respond, names=NAMES
)

router = APIRouter()


@router.post(
    "/messages",
    responses=responses(MessageDocument, streams=True),
    openapi_extra=described(MessagesRequest) | TIMEOUT_PARAMETER,
)
async def messages(request: Request, caller: Annotated[Caller, requires_inference(cached=True)]) -> Response:
    return await plane_of(request).generate(request, caller, DIALECT)
