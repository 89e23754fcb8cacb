"""The routes of `/v1`. Every route names the scope it needs; bodies go through the closed parameter table."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, TypeAlias, TypeVar
from uuid import uuid4

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel
from starlette.responses import Response

from loraplex.engine.errors import ServerShuttingDown
from loraplex.platform.auth.authenticator import Authenticator, Caller
from loraplex.platform.errors import ClientGone, EngineFailed, describe
from loraplex.platform.inference.admission import RequestContext
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.inference.generation import Generation
from loraplex.platform.inference.model_resolution import ResolvedModel
from loraplex.platform.inference.pipeline import InferencePipeline
from loraplex.platform.inference.prompting.token_text import TextOf
from loraplex.platform.observability.request_id import request_id_of, response_headers_of
from loraplex.platform.observability.request_record import (
    InferenceCall,
    note_authentication,
    request_record_of,
)
from loraplex.platform.parameters.parameter_table import GenerationEndpoint, read_parameters
from loraplex.platform.parameters.request_models import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationBody,
    ModelRequest,
    StreamOptions,
    TokenizeRequest,
)
from loraplex.platform.parameters.request_object import read_reporting
from loraplex.platform.tenant_limiter import AT_ONCE, MAX_WAITING, TenantLimiter
from loraplex.platform.web.openai.chat_responses import chat_chunks, collect_chat
from loraplex.platform.web.openai.completion_responses import collect_completion, completion_chunks
from loraplex.platform.web.openai.openapi import body_schema, generation_responses
from loraplex.platform.web.openai.request_timeout import TIMEOUT_PARAMETER, deadline_of
from loraplex.platform.web.openai.response_envelope import ResponseHead
from loraplex.platform.web.openai.response_models import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    DetokenizedText,
    ModelCard,
    ModelList,
    TokenCount,
    encoded,
)
from loraplex.platform.web.openai.token_ids import ExtendedChunks, with_token_ids
from loraplex.platform.web.responses import documented
from loraplex.platform.web.transport.body_budget import BodyLease, body_lease
from loraplex.platform.web.transport.client_presence import UnlessDisconnected, unless_disconnected
from loraplex.platform.web.transport.direct_routes import DirectRoute, Handle
from loraplex.platform.web.transport.request_body import read_object
from loraplex.platform.web.transport.sse import ChunkEncoder, EventStream
from loraplex.tenants.ledger.refusal_counts import Refused

T = TypeVar("T")
RequestT = TypeVar("RequestT", bound=ModelRequest)
Collect: TypeAlias = Callable[[ResponseHead, Generation, TextOf], Awaitable[ChatCompletion | Completion]]

SCOPE = "inference"
PREFIX: Final = "/v1"
NO_STREAM_OPTIONS: Final = StreamOptions()
# The names of OpenTelemetry's conventions for generative AI.
OPERATIONS: Final[dict[GenerationEndpoint, str]] = {"chat": "chat", "completions": "text_completion"}
# Statuses of errors that may be found before the request is admitted.
UNADMITTED = frozenset({400, 404, 408, 413, 415})


def inference_router(
    dependencies: GatewayDependencies, authenticator: Authenticator
) -> tuple[APIRouter, dict[str, DirectRoute]]:
    """Build the router of the inference plane, and those of its routes that generate, by their paths."""
    router = APIRouter(prefix=PREFIX, tags=["inference"])
    inference = InferencePipeline(dependencies)
    # Admission refuses a request whose cached key is outdated. Routes without admission look the key up for each request.
    authenticate = authenticator.requires(SCOPE, cached=True, known=True)
    authorized = Depends(authenticator.requires(SCOPE, known=True))
    admissible = Depends(authenticate)
    limits = dependencies.config
    transactions = TenantLimiter("requests", per_tenant=AT_ONCE, waiting=MAX_WAITING)
    tokenizing = TenantLimiter(
        "calls of /v1/tokenize and /v1/detokenize",
        total=limits.max_tokenizing,
        per_tenant=limits.max_tokenizing_per_tenant,
    )
    card = partial(_card, dependencies, inference, int(time.time()))

    async def read_named(
        request: Request, caller: Caller, read: Callable[[dict[str, Any]], RequestT], lease: BodyLease
    ) -> tuple[RequestT, ResolvedModel]:
        values = await _read_body(dependencies, request, caller, read, lease)
        async with transactions.slot(caller.tenant_id):
            found = await inference.models.read(caller, values.model)
        response_headers_of(request.scope).update(found.headers())
        return values, found

    def context_of(request: Request, caller: Caller) -> RequestContext:
        return RequestContext(
            caller=caller,
            request_id=request_id_of(request.scope),
            renew_caller=partial(authenticator.renew, scope=SCOPE),
            confirm_caller=partial(authenticator.confirm, scope=SCOPE),
            headers=response_headers_of(request.scope),
            record=request_record_of(request.scope),
        )

    async def generate(request: Request, caller: Caller, endpoint: GenerationEndpoint) -> Response:
        note_authentication(request.scope)
        context = context_of(request, caller)
        try:
            if dependencies.health is not None and dependencies.health.refusing:
                raise ServerShuttingDown("the server is shutting down")
            context.deadline = deadline_of(request.headers)
            inference.repeat_refusal(context)
            return await _generate(dependencies, inference, request, context, endpoint)
        except Exception as error:
            if _needs_no_admission(error):
                async with transactions.slot(caller.tenant_id):
                    await context.confirm()
            _count_refusal(dependencies, context, error)
            raise

    @router.post(
        "/chat/completions",
        responses=generation_responses(ChatCompletion, ChatCompletionChunk),
        openapi_extra=body_schema(ChatRequest) | TIMEOUT_PARAMETER,
    )
    async def chat_completions(request: Request, caller: Annotated[Caller, admissible]) -> Response:
        return await generate(request, caller, "chat")

    @router.post(
        "/completions",
        responses=generation_responses(Completion, Completion),
        openapi_extra=body_schema(CompletionRequest) | TIMEOUT_PARAMETER,
    )
    async def completions(request: Request, caller: Annotated[Caller, admissible]) -> Response:
        return await generate(request, caller, "completions")

    @router.get("/models", responses=documented(response=ModelList))
    async def models(caller: Annotated[Caller, authorized]) -> Response:
        async with transactions.slot(caller.tenant_id):
            found = await inference.models.list(caller)
        return json_response(ModelList(object="list", data=[card(each) for each in found]))

    @router.get("/models/{name:path}", responses=documented(response=ModelCard))
    async def one_model(name: str, caller: Annotated[Caller, authorized]) -> Response:
        async with transactions.slot(caller.tenant_id):
            found = await inference.models.read(caller, name)
        return json_response(card(found), found.headers())

    @router.post(
        "/tokenize",
        responses=documented(response=TokenCount),
        openapi_extra=body_schema(TokenizeRequest),
    )
    async def tokenize(request: Request, caller: Annotated[Caller, authorized]) -> Response:
        with body_lease(request) as lease:
            values, found = await read_named(
                request, caller, lambda body: read_parameters("tokenize", body), lease
            )
            async with tokenizing.slot(caller.tenant_id):
                prompts = await inference.prompt_ids(values, found, caller.tenant_id)
        return json_response(_tokens(inference.context_tokens, prompts))

    @router.post(
        "/detokenize",
        responses=documented(response=DetokenizedText),
        openapi_extra=body_schema(DetokenizeRequest),
    )
    async def detokenize(request: Request, caller: Annotated[Caller, authorized]) -> Response:
        with body_lease(request) as lease:
            values, _ = await read_named(
                request, caller, lambda body: read_parameters("detokenize", body), lease
            )
            inference.check_vocabulary(values.tokens, "tokens")
            async with tokenizing.slot(caller.tenant_id):
                text = await asyncio.to_thread(dependencies.prompts.text_of, values.tokens)
        return json_response(DetokenizedText(prompt=text))

    def direct(endpoint: GenerationEndpoint) -> Handle:
        async def handle(request: Request) -> Response:
            return await generate(request, await authenticate(request), endpoint)

        return handle

    return router, {
        f"{PREFIX}/chat/completions": DirectRoute(chat_completions, direct("chat")),
        f"{PREFIX}/completions": DirectRoute(completions, direct("completions")),
    }


def _needs_no_admission(error: Exception) -> bool:
    """Whether the error may precede admission: then the key was not yet checked against the current policy."""
    return describe(error).row.status in UNADMITTED


def _count_refusal(dependencies: GatewayDependencies, context: RequestContext, error: Exception) -> None:
    """Count a request that ended without a record in the ledger, unless its client left."""
    if context.is_recorded or isinstance(error, ClientGone):
        return
    refused = Refused(
        tenant_id=context.caller.tenant_id,
        api_key_id=context.caller.api_key_id,
        adapter_id=context.record.adapter_id,
        code=describe(error).row.code,
    )
    dependencies.admission_controller.count_refusal(refused)


async def _read_body(
    dependencies: GatewayDependencies,
    request: Request,
    caller: Caller,
    read: Callable[[dict[str, Any]], T],
    lease: BodyLease,
) -> T:
    namespace = dependencies.namespace_of(caller.tenant_id)

    async def check_in_worker(body: bytes) -> None:
        checking = dependencies.request_analysis.check_body(namespace, body)
        await unless_disconnected(request.scope, request.receive, checking)

    return await read_object(request, dependencies.config.body, read, check_in_worker, lease)


@dataclass(frozen=True, slots=True)
class _StartedGeneration:
    """A running generation, and what its response needs of the body, whose values are no longer in memory."""

    generation: Generation
    head: ResponseHead
    stream: bool
    stream_options: StreamOptions
    token_ids: bool
    text_of: TextOf


async def _generate(
    dependencies: GatewayDependencies,
    inference: InferencePipeline,
    request: Request,
    context: RequestContext,
    endpoint: GenerationEndpoint,
) -> Response:
    with body_lease(request) as lease:
        model: type[GenerationBody] = ChatRequest if endpoint == "chat" else CompletionRequest
        read = partial(read_reporting, model)
        values, context.unknown = await _read_body(dependencies, request, context.caller, read, lease)
        kind = "chatcmpl" if endpoint == "chat" else "cmpl"
        head = ResponseHead(f"{kind}-{uuid4().hex}", int(time.time()), values.model)
        context.record.call = _call(OPERATIONS[endpoint], head, values)
        async with UnlessDisconnected(request.scope, request.receive):
            started = await _start(dependencies, inference, context, head, values)
            del values
            lease.release()
            if not started.stream:
                return await _whole(started, endpoint)
    chunks, headers = _chunks(started, endpoint), started.generation.headers()
    return EventStream(started.generation, chunks, headers, dependencies.config.reader_stall_s)


async def _start(
    dependencies: GatewayDependencies,
    inference: InferencePipeline,
    context: RequestContext,
    head: ResponseHead,
    values: GenerationBody,
) -> _StartedGeneration:
    generation, text_of = await inference.begin(context, values), dependencies.token_text
    return _StartedGeneration(
        generation,
        head,
        values.stream,
        values.stream_options or NO_STREAM_OPTIONS,
        values.return_token_ids,
        text_of.numbered if values.return_tokens_as_token_ids else text_of,
    )


def _chunks(started: _StartedGeneration, endpoint: GenerationEndpoint) -> ChunkEncoder:
    chat, ids, usage = endpoint == "chat", started.token_ids, started.stream_options.include_usage
    encoder = chat_chunks if chat else completion_chunks
    chunks = encoder(started.head, started.generation, started.text_of, usage)
    usage = usage and started.stream_options.continuous_usage_stats
    if not ids and not usage:
        return chunks
    return ExtendedChunks(chunks, started.generation, token_ids=ids, usage=usage, chat=chat)


async def _whole(started: _StartedGeneration, endpoint: GenerationEndpoint) -> Response:
    generation = started.generation
    failure: Exception | None = None
    try:
        async with generation.delivering():
            document = await _collect(started, endpoint)
    except Exception as error:
        failure = error
        raise
    finally:
        await generation.close(failure, streams=False)
    return json_response(document, generation.headers())


async def _collect(started: _StartedGeneration, endpoint: GenerationEndpoint) -> ChatCompletion | Completion:
    """Collect the whole response. A generation that loses its engine starts once more, because nothing was sent."""
    collect: Collect = collect_chat if endpoint == "chat" else collect_completion
    run = partial(collect, started.head, started.generation, started.text_of)
    if started.token_ids:
        started.generation.keep_token_ids()
    try:
        document = await run()
    except EngineFailed as lost:
        await started.generation.restart(lost)
        document = await run()
    return with_token_ids(document, started.generation) if started.token_ids else document


def _call(operation: str, head: ResponseHead, values: GenerationBody) -> InferenceCall:
    return InferenceCall(
        operation=operation,
        model=values.model,
        response_id=head.id,
        choices=values.n,
        max_tokens=values.requested_tokens,
        temperature=values.temperature,
        top_p=values.top_p,
    )


def _card(
    dependencies: GatewayDependencies, inference: InferencePipeline, started: int, model: ResolvedModel
) -> ModelCard:
    return ModelCard(
        id=model.name,
        object="model",
        created=started if model.created is None else model.created,
        owned_by="loraplex",
        root=model.adapter or model.name,
        parent=None if model.adapter is None else dependencies.served_model_name,
        system_fingerprint=dependencies.engine.info().system_fingerprint,
        max_model_len=inference.context_tokens,
    )


def _tokens(limit: int, prompts: list[list[int]]) -> TokenCount:
    tokens = prompts[0] if len(prompts) == 1 else prompts
    return TokenCount.model_construct(count=sum(map(len, prompts)), max_model_len=limit, tokens=tokens)


def json_response(document: BaseModel, headers: dict[str, str] | None = None) -> Response:
    """Build the JSON response of a document."""
    return Response(encoded(document), media_type="application/json", headers=headers)
