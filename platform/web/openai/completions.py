"""`/v1/completions`."""

from typing import Annotated, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Caller
from loraplex.platform.parameters.request_models import CompletionRequest
from loraplex.platform.web.inference_plane import Dialect, plane_of, requires_inference
from loraplex.platform.web.openai.completion_responses import CompletionChunks, collect_completion
from loraplex.platform.web.openai.generation_response import GenerationWriter
from loraplex.platform.web.openai.openapi import generation_responses
from loraplex.platform.web.openai.response_models import Completion
from loraplex.platform.web.openapi import referred_body
from loraplex.platform.web.request_timeout import TIMEOUT_PARAMETER

WRITER: Final = GenerationWriter("cmpl", CompletionChunks, collect_completion, chat=False)
DIALECT: Final = Dialect(operation="text_completion", body=CompletionRequest, respond=WRITER.respond)

router = APIRouter()


@router.post(
    "/completions",
    responses=generation_responses(Completion, Completion),
    openapi_extra=referred_body(CompletionRequest, TIMEOUT_PARAMETER),
)
async def completions(
    request: Request, caller: Annotated[Caller, requires_inference(cached=True)]
) -> Response:
    return await plane_of(request).generate(request, caller, DIALECT)
