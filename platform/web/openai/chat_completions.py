"""`/v1/chat/completions`."""

from dataclasses import replace
from typing import Annotated, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Caller
from loraplex.platform.parameters.request_models import ChatRequest
from loraplex.platform.web.inference_plane import Dialect, plane_of, requires_inference
from loraplex.platform.web.openai.chat_responses import chat_chunks, collect_chat
from loraplex.platform.web.openai.generation_response import GenerationWriter
from loraplex.platform.web.openai.openapi import generation_responses
from loraplex.platform.web.openai.response_models import ChatCompletion, ChatCompletionChunk
from loraplex.platform.web.openapi import referred_body
from loraplex.platform.web.request_timeout import TIMEOUT_PARAMETER

WRITER: Final = GenerationWriter("chatcmpl", chat_chunks, collect_chat, chat=True)
DIALECT: Final = Dialect(operation="chat", body=ChatRequest, respond=WRITER.respond)
RECORDED: Final = replace(DIALECT, recorded=True)
"""That of clients; what a gateway asks of itself is not recorded."""

router = APIRouter()


@router.post(
    "/chat/completions",
    responses=generation_responses(ChatCompletion, ChatCompletionChunk),
    openapi_extra=referred_body(ChatRequest, TIMEOUT_PARAMETER),
)
async def chat_completions(
    request: Request, caller: Annotated[Caller, requires_inference(cached=True)]
) -> Response:
    return await plane_of(request).generate(request, caller, RECORDED)
