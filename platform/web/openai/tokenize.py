"""`/v1/tokenize` and `/v1/detokenize`: what a text is in tokens, and tokens in text, without generating."""

import asyncio
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Request
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Caller
from loraplex.platform.parameters.request_models import DetokenizeRequest, TokenizeRequest
from loraplex.platform.parameters.request_object import read_object
from loraplex.platform.web.inference_plane import json_response, plane_of, requires_inference
from loraplex.platform.web.openai.response_models import DetokenizedText, TokenCount, encoded
from loraplex.platform.web.openapi import referred_body
from loraplex.platform.web.responses import documented
from loraplex.platform.web.transport.body_budget import body_lease

Authorized = Annotated[Caller, requires_inference()]

router = APIRouter()


@router.post(
    "/tokenize", responses=documented(response=TokenCount), openapi_extra=referred_body(TokenizeRequest)
)
async def tokenize(request: Request, caller: Authorized) -> Response:
    plane = plane_of(request)
    with body_lease(request) as lease:
        values = await plane.read_body(request, caller, partial(read_object, TokenizeRequest), lease)
        found = await plane.read_model(request, caller, values.model)
        async with plane.tokenizing.slot(caller.tenant_id):
            prompts = await plane.pipeline.encoder.encode(values, found, caller.tenant_id)
    tokens = prompts[0] if len(prompts) == 1 else prompts
    limit, count = plane.pipeline.encoder.context_tokens, sum(map(len, prompts))
    return json_response(encoded(TokenCount.model_construct(count=count, max_model_len=limit, tokens=tokens)))


@router.post(
    "/detokenize",
    responses=documented(response=DetokenizedText),
    openapi_extra=referred_body(DetokenizeRequest),
)
async def detokenize(request: Request, caller: Authorized) -> Response:
    plane = plane_of(request)
    with body_lease(request) as lease:
        values = await plane.read_body(request, caller, partial(read_object, DetokenizeRequest), lease)
        await plane.read_model(request, caller, values.model)
        plane.pipeline.encoder.check_vocabulary(values.tokens, "tokens")
        async with plane.tokenizing.slot(caller.tenant_id):
            text = await asyncio.to_thread(plane.dependencies.prompts.text_of, values.tokens)
    return json_response(encoded(DetokenizedText(prompt=text)))
