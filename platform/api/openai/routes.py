"""The routes of `/v1`. Every route names the scope it needs; bodies go through the closed parameter table."""

import time
from functools import partial
from typing import Annotated
from uuid import uuid4

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from loraplex.platform.api.openai.chat_responses import chat_chunks, collect_chat
from loraplex.platform.api.openai.completion_responses import collect_completion, completion_chunks
from loraplex.platform.api.openai.openapi import ANSWERING, READING, body_schema
from loraplex.platform.api.openai.response_envelope import ResponseHead
from loraplex.platform.api.request_body import read_object
from loraplex.platform.api.request_id import answer_headers_of, request_id_of
from loraplex.platform.api.sse import EventStream, unless_disconnected
from loraplex.platform.auth.authenticator import Authenticator, Caller
from loraplex.platform.errors import describe
from loraplex.platform.inference.admission import RequestContext
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.inference.model_resolution import list_models, resolve_model
from loraplex.platform.inference.pipeline import InferencePipeline
from loraplex.platform.parameters.parameter_table import Endpoint, Values, read_parameters
from loraplex.platform.tenant_limiter import RefusingTenantLimiter, WaitingTenantLimiter

SCOPE = "inference"
# What is wrong with a request, found before it is admitted or without it.
UNADMITTED = frozenset({400, 404, 408, 413})


def inference_router(services: GatewayDependencies, authenticator: Authenticator) -> APIRouter:
    """All routes of the inference plane."""
    router = APIRouter(prefix="/v1", tags=["inference"])
    inference = InferencePipeline(services)
    # Admission knows when a cached key is outdated; what is not admitted looks its key up.
    authorized, admissible = (
        Depends(authenticator.requires(SCOPE, cached=cached)) for cached in (False, True)
    )
    limits = services.limits
    turns = WaitingTenantLimiter()
    tokenizing = RefusingTenantLimiter(
        limits.max_tokenizing, limits.max_tokenizing_per_tenant, "calls of /v1/tokenize"
    )
    started, base = int(time.time()), services.served_model_name

    def call_of(request: Request, caller: Caller) -> RequestContext:
        return RequestContext(
            caller=caller,
            request_id=request_id_of(request.scope),
            renewed=partial(authenticator.renewed, scope=SCOPE),
            confirmed=partial(authenticator.confirm, scope=SCOPE),
            headers=answer_headers_of(request.scope),
        )

    async def answer(request: Request, caller: Caller, endpoint: Endpoint) -> Response:
        call = call_of(request, caller)
        try:
            return await _answer(services, inference, request, call, endpoint)
        except Exception as error:
            if _needs_no_admission(error):
                async with turns.taken(caller.tenant_id):
                    await call.confirm()
            raise

    @router.post("/chat/completions", responses=ANSWERING, openapi_extra=body_schema("chat"))
    async def chat_completions(request: Request, caller: Annotated[Caller, admissible]) -> Response:
        return await answer(request, caller, "chat")

    @router.post("/completions", responses=ANSWERING, openapi_extra=body_schema("completions"))
    async def completions(request: Request, caller: Annotated[Caller, admissible]) -> Response:
        return await answer(request, caller, "completions")

    @router.get("/models", responses=READING)
    async def models(caller: Annotated[Caller, authorized]) -> Response:
        async with turns.taken(caller.tenant_id):
            found = await list_models(services, caller)
        return json_response({"object": "list", "data": [each.card(started, base) for each in found]})

    @router.get("/models/{name:path}", responses=READING)
    async def one_model(name: str, caller: Annotated[Caller, authorized]) -> Response:
        found = await resolve_model(services, caller, name)
        return json_response(found.card(started, base), found.headers())

    @router.post("/tokenize", responses=READING, openapi_extra=body_schema("tokenize"))
    async def tokenize(request: Request, caller: Annotated[Caller, authorized]) -> Response:
        values = await _values(services, request, caller, "tokenize")
        found = await resolve_model(services, caller, values["model"])
        answer_headers_of(request.scope).update(found.headers())
        with tokenizing.taken(caller.tenant_id):
            prompts = await inference.prompt_ids(values, found, caller.tenant_id)
        return json_response(_tokens(services, prompts))

    return router


def _needs_no_admission(error: Exception) -> bool:
    """Whether it may have come before admission, and so be the answer to a key that is good no more."""
    return describe(error).row.status in UNADMITTED


async def _values(
    services: GatewayDependencies, request: Request, caller: Caller, endpoint: Endpoint
) -> Values:
    namespace = services.namespace_of(caller.tenant_id)

    async def check_elsewhere(body: bytes) -> None:
        await unless_disconnected(request.receive, services.preparation.check_body(namespace, body))

    return await read_object(
        request, services.limits.body, partial(read_parameters, endpoint), check_elsewhere
    )


async def _answer(
    services: GatewayDependencies,
    inference: InferencePipeline,
    request: Request,
    call: RequestContext,
    endpoint: Endpoint,
) -> Response:
    values = await _values(services, request, call.caller, endpoint)
    kind = "chatcmpl" if endpoint == "chat" else "cmpl"
    head = ResponseHead(f"{kind}-{uuid4().hex}", int(time.time()), values["model"])
    if not values["stream"]:
        work = _whole(services, inference, call, endpoint, values, head)
        return await unless_disconnected(request.receive, work)
    begun = inference.begin(call, endpoint, values)
    generation = await unless_disconnected(request.receive, begun)
    encoder = chat_chunks if endpoint == "chat" else completion_chunks
    include_usage = bool((values["stream_options"] or {}).get("include_usage"))
    chunks = encoder(head, generation, services.token_text, include_usage)
    return EventStream(generation, chunks, generation.headers(), services.limits.reader_stall_s)


async def _whole(
    services: GatewayDependencies,
    inference: InferencePipeline,
    call: RequestContext,
    endpoint: Endpoint,
    values: Values,
    head: ResponseHead,
) -> Response:
    generation = await inference.begin(call, endpoint, values)
    collect = collect_chat if endpoint == "chat" else collect_completion
    failure: BaseException | None = None
    try:
        answer = await collect(head, generation, services.token_text)
    except BaseException as error:
        failure = error
        raise
    finally:
        await generation.close(failure)
    return json_response(answer, generation.headers())


def _tokens(services: GatewayDependencies, prompts: list[list[int]]) -> dict[str, object]:
    limit = services.engine.info().max_model_len
    if len(prompts) == 1:
        return {"count": len(prompts[0]), "max_model_len": limit, "tokens": prompts[0]}
    return {"count": sum(map(len, prompts)), "max_model_len": limit, "tokens": prompts}


def json_response(content: object, headers: dict[str, str] | None = None) -> Response:
    """`content` as JSON."""
    return Response(msgspec.json.encode(content), media_type="application/json", headers=headers)
