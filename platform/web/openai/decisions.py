"""`/v1/decisions`: typed questions about one input, answered by the probabilities of their options (OpenAI Decisions API)."""

from functools import partial
from typing import Annotated, Final
from uuid import uuid4

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from loraplex.platform.auth.authenticator import Caller
from loraplex.platform.inference.admission import RequestContext
from loraplex.platform.inference.decisions.decision import DecisionUsage
from loraplex.platform.observability.request_record import InferenceCall
from loraplex.platform.parameters.decision_request import DecisionRequest
from loraplex.platform.parameters.request_object import read_reporting
from loraplex.platform.web.inference_plane import json_response, plane_of, requires_inference
from loraplex.platform.web.openai.decision_models import DecisionResponse
from loraplex.platform.web.openai.responses.conversation import read_items
from loraplex.platform.web.openai.responses.models import ResponseUsage
from loraplex.platform.web.openapi import referred_body
from loraplex.platform.web.request_timeout import TIMEOUT_PARAMETER
from loraplex.platform.web.responses import documented
from loraplex.platform.web.transport.body_budget import body_lease
from loraplex.platform.web.transport.client_presence import UnlessDisconnected

MASS_HEADER: Final = "x-loraplex-label-mass-min"
NAMES: Final = {"messages": "input"}

router = APIRouter()


@router.post(
    "/decisions",
    responses=documented(422, 504, response=DecisionResponse),
    openapi_extra=referred_body(DecisionRequest, TIMEOUT_PARAMETER),
)
async def decisions(request: Request, caller: Annotated[Caller, requires_inference(cached=True)]) -> Response:
    return await plane_of(request).answer(request, caller, partial(_decide, request), NAMES)


async def _decide(request: Request, context: RequestContext) -> Response:
    plane = plane_of(request)
    with body_lease(request) as lease:
        read = partial(read_reporting, DecisionRequest)
        values, context.unknown = await plane.read_body(request, context.caller, read, lease)
        messages, _ = read_items(None, values.input, lambda *_: "")
        if values.prompt_cache_key:
            plane.name_session(context, values.prompt_cache_key)
        context.record.call = InferenceCall(
            operation="decision",
            model=values.model,
            response_id=f"dec_{uuid4().hex}",
            choices=len(values.questions),
            max_tokens=0,
            temperature=None,
            top_p=None,
        )
        async with UnlessDisconnected(request.scope, request.receive):
            async with plane.decisions.begun(context, values, messages) as decision:
                lease.release()
                answers, mass = await decision.answers()
            usage = _usage(decision.usage)
    document = {"answers": answers, "model": values.model, "usage": usage}
    return json_response(msgspec.json.encode(document), {MASS_HEADER: f"{mass:.6f}"})


def _usage(usage: DecisionUsage) -> ResponseUsage:
    return {
        "input_tokens": usage.input,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": usage.written},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.input,
    }
