"""Generates for a route of `/v1`: reads its body, starts the generation, and sends what the route's dialect makes of it.

A dialect is an API that clients speak, such as chat completions of OpenAI. Its `Dialect` reads a body into the one request that all
else knows, and writes streams and whole responses; all else is the same for every dialect.
"""

import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import random
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from fastapi import Depends
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from loraplex.engine.errors import ServerShuttingDown
from loraplex.grammar.errors import GrammarRefused
from loraplex.platform.auth.authenticator import Authenticator, Caller
from loraplex.platform.errors import (
    InvalidParameter,
    UnknownParameter,
    describe,
)
from loraplex.platform.inference.admission import RequestContext
from loraplex.platform.inference.decisions.pipeline import DecisionPipeline
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.inference.generation import Generation
from loraplex.platform.inference.model_resolution import ResolvedModel
from loraplex.platform.inference.pipeline import InferencePipeline
from loraplex.platform.inference.prompting.token_text import TokenText
from loraplex.platform.inference.request_recording import KeptRequest, RequestRecording, kept_request
from loraplex.platform.inference.sessions import session_label
from loraplex.platform.inference.thought_seal import ThoughtSeal
from loraplex.platform.observability.request_id import request_id_of, response_headers_of
from loraplex.platform.observability.request_record import (
    InferenceCall,
    note_authentication,
    request_record_of,
)
from loraplex.platform.parameters.request_models import ChatRequest, GenerationBody, ModelRequest
from loraplex.platform.parameters.request_object import UnknownNames, read_reporting
from loraplex.platform.parameters.request_object import read_object as read_checked
from loraplex.platform.tenant_limiter import AT_ONCE, MAX_WAITING, TenantLimiter
from loraplex.platform.web.request_timeout import deadline_of
from loraplex.platform.web.transport.body_budget import BodyLease, body_lease
from loraplex.platform.web.transport.client_presence import UnlessDisconnected, unless_disconnected
from loraplex.platform.web.transport.request_body import read_object
from loraplex.platform.web.transport.sse import ChunkEncoder, EventStream
from loraplex.tenants.scopes import INFERENCE

T = TypeVar("T")
Work: TypeAlias = Callable[[RequestContext], Awaitable[Response]]
BodyT = TypeVar("BodyT", bound=ModelRequest)
# Statuses of errors that may be found before the request is admitted.
UNADMITTED: Final = frozenset({400, 404, 408, 413, 415})


class DialectResponse(Protocol):
    """What a response needs of its body, whose values are no longer in memory once it is sent.

    `id`: its id, which clients see. `stream`: it is sent as events.
    """

    @property
    def id(self) -> str: ...

    @property
    def stream(self) -> bool: ...

    def chunks(self, generation: Generation) -> ChunkEncoder:
        """Return what writes the events of a stream."""
        ...

    async def collect(self, generation: Generation) -> bytes:
        """Wait for the end of the generation, and return the non-streaming response as JSON."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DialectContext:
    """What a dialect needs besides the body. `response_headers` go out with any response, also with an error. `seal`: the caller's."""

    request_headers: Headers
    response_headers: dict[str, str]
    seal: ThoughtSeal
    text: TokenText


def _unchanged(body: Any, context: DialectContext) -> Any:
    return body


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect(Generic[BodyT]):
    """One endpoint that generates. `operation`: its name in OpenTelemetry's conventions for generative AI.

    `read`: (body, context) -> the request that the pipeline knows; raises `InvalidParameter`. `respond`: (body, context) -> the
    response. `names`: the fields of the pipeline's request that errors name, by what this dialect calls them. `recorded`: its
    requests are recorded for tenants that say so.
    """

    operation: str
    body: type[BodyT]
    respond: Callable[[BodyT, DialectContext], DialectResponse]
    read: Callable[[BodyT, DialectContext], GenerationBody] = _unchanged
    names: Mapping[str, str] = field(default_factory=dict)
    recorded: bool = False


class InferencePlane:
    """What the routes of `/v1` share, as `app.state.inference`."""

    def __init__(self, dependencies: GatewayDependencies, authenticator: Authenticator) -> None:
        limits = dependencies.config
        self.dependencies = dependencies
        self.pipeline = InferencePipeline(dependencies)
        self.decisions = DecisionPipeline(dependencies, self.pipeline)
        self.started = int(time.time())
        self.transactions = TenantLimiter("requests", per_tenant=AT_ONCE, waiting=MAX_WAITING)
        self.tokenizing = TenantLimiter(
            "calls of /v1/tokenize and /v1/detokenize",
            total=limits.max_tokenizing,
            per_tenant=limits.max_tokenizing_per_tenant,
        )
        self._authenticator = authenticator
        self._renew = partial(authenticator.renew, scope=INFERENCE)
        self._confirm = partial(authenticator.confirm, scope=INFERENCE)

    async def authorize(self, request: Request, *, cached: bool) -> Caller:
        """Return the caller. With `cached`, admission refuses a request whose key is outdated; without, the key is looked up."""
        return await self._authenticator.authorize(request, INFERENCE, cached=cached, known=True, either=True)

    async def read_model(self, request: Request, caller: Caller, name: str) -> ResolvedModel:
        """Return the model of this name, which the response's headers tell. Raises `ModelNotFound`."""
        async with self.transactions.slot(caller.tenant_id):
            found = await self.pipeline.models.read(caller, name)
        response_headers_of(request.scope).update(found.headers())
        return found

    async def read_body(
        self, request: Request, caller: Caller, read: Callable[[dict[str, Any]], T], lease: BodyLease
    ) -> T:
        """Read the body as `read_object`; one of many values is checked in a worker process."""
        namespace = self.dependencies.namespace_of(caller.tenant_id)

        async def check_in_worker(body: bytes) -> None:
            checking = self.dependencies.request_analysis.check_body(namespace, body)
            await unless_disconnected(request.scope, request.receive, checking)

        return await read_object(request, self.dependencies.config.body, read, check_in_worker, lease)

    async def generate(self, request: Request, caller: Caller, dialect: Dialect[BodyT]) -> Response:
        """Generate what the request's body asks for."""
        return await self.answer(request, caller, partial(self.begin, dialect, request), dialect.names)

    async def answer(
        self, request: Request, caller: Caller, work: Work, names: Mapping[str, str]
    ) -> Response:
        """Answer a request by `work`. `names`: as in `Dialect`."""
        note_authentication(request.scope)
        context = RequestContext(
            caller=caller,
            request_id=request_id_of(request.scope),
            renew_caller=self._renew,
            confirm_caller=self._confirm,
            headers=response_headers_of(request.scope),
            record=request_record_of(request.scope),
            names=names,
        )
        health = self.dependencies.health
        try:
            if health is not None and health.refusing:
                raise ServerShuttingDown("the server is shutting down")
            context.deadline = deadline_of(request.headers)
            self.pipeline.repeat_refusal(context)
            return await work(context)
        except Exception as error:
            row = describe(error).row
            if row.status in UNADMITTED:
                # The key was not yet checked against the current policy.
                async with self.transactions.slot(caller.tenant_id):
                    await context.confirm()
            if not context.is_recorded:
                context.record.ledger_id = None
            if isinstance(error, InvalidParameter | GrammarRefused):
                rename_parameter(error, names)
            raise

    async def begin(self, dialect: Dialect[BodyT], request: Request, context: RequestContext) -> Response:
        """Read a request's body, start its generation, and return its response: as a stream, or once it is whole."""
        of_dialect = self._dialect_context(request, context.caller)
        tenant_id, recordings = context.caller.tenant_id, self.dependencies.recordings
        is_recorded = dialect.recorded and random() * 100 < recordings.percents.get(tenant_id, 0)
        kept: KeptRequest | None = None

        # Where the body is parsed, off the event loop if it is large: a conversation takes time of the same order.
        def read(given: dict[str, Any]) -> tuple[GenerationBody, UnknownNames | None, DialectResponse]:
            nonlocal kept
            try:
                body, unknown = read_reporting(dialect.body, given)
            except InvalidParameter:
                context.record.asked_model = given.get("model")
                raise
            kept = kept_request(given) if is_recorded else None
            return dialect.read(body, of_dialect), unknown, dialect.respond(body, of_dialect)

        with body_lease(request) as lease:
            values, context.unknown, response = await self.read_body(request, context.caller, read, lease)
            if values.prompt_cache_key:
                self.name_session(context, values.prompt_cache_key)
            context.record.call = _call(dialect.operation, response.id, values)
            async with UnlessDisconnected(request.scope, request.receive):
                generation = await self.pipeline.begin(context, values)
                del values
                lease.release()
                if kept is not None:
                    base_digest = self.dependencies.engine.info().model_digest
                    generation.observer = RequestRecording(
                        recordings, kept, tenant_id, base_digest, generation
                    )
                if not response.stream:
                    return json_response(await _collect(response, generation), generation.headers())
        stall_s = self.dependencies.config.reader_stall_s
        return EventStream(generation, response.chunks(generation), generation.headers(), stall_s)

    def name_session(self, context: RequestContext, key: str) -> None:
        """Let the request belong to the session that its `prompt_cache_key` names."""
        context.session = session_label(self.dependencies.derive_key, context.caller.tenant_id, key)

    async def count(
        self,
        request: Request,
        caller: Caller,
        model: type[BodyT],
        read: Callable[[BodyT, DialectContext], ChatRequest],
        names: Mapping[str, str],
    ) -> int:
        """Return the tokens of the prompt, of any length, that `read` makes of a body of `model`. `names`: as in `Dialect`."""
        context = self._dialect_context(request, caller)
        try:
            with body_lease(request) as lease:
                values = await self.read_body(
                    request, caller, lambda given: read(read_checked(model, given), context), lease
                )
                found = await self.read_model(request, caller, values.model)
                values = values.with_defaults(found.defaults)
                async with self.tokenizing.slot(caller.tenant_id):
                    [ids] = await self.pipeline.encoder.encode(
                        values, found, caller.tenant_id, only_counted=True
                    )
        except (InvalidParameter, GrammarRefused) as error:
            rename_parameter(error, names)
            raise
        return len(ids)

    def _dialect_context(self, request: Request, caller: Caller) -> DialectContext:
        return DialectContext(
            request_headers=request.headers,
            response_headers=response_headers_of(request.scope),
            seal=ThoughtSeal(self.dependencies.derive_key, caller.tenant_id),
            text=self.dependencies.token_text,
        )


def rename_parameter(error: InvalidParameter | GrammarRefused, names: Mapping[str, str]) -> None:
    """Let an error name its field as the dialect does, in its text too. An unknown name is the client's own."""
    inner = re.split(r"[.\[]", error.param or "", maxsplit=1)[0]
    if inner in names and not isinstance(error, UnknownParameter):
        outer = names[inner]
        error.args = (str(error).replace(f"`{inner}", f"`{outer}"), *error.args[1:])
        error.param = outer + (error.param or "").removeprefix(inner)


async def _collect(response: DialectResponse, generation: Generation) -> bytes:
    """Collect the non-streaming response."""
    failure: Exception | None = None
    try:
        async with generation.delivering():
            return await response.collect(generation)
    except Exception as error:
        failure = error
        raise
    finally:
        await generation.close(failure, streams=False)


def _call(operation: str, response_id: str, values: GenerationBody) -> InferenceCall:
    return InferenceCall(
        operation=operation,
        model=values.model,
        response_id=response_id,
        choices=values.n,
        max_tokens=values.requested_tokens,
        temperature=values.temperature,
        top_p=values.top_p,
    )


def plane_of(request: Request) -> InferencePlane:
    """Return what the routes of `/v1` share."""
    plane: InferencePlane = request.app.state.inference
    return plane


def requires_inference(*, cached: bool = False) -> Any:
    """Return a dependency that gives a route of `/v1` its caller, as `InferencePlane.authorize`."""

    async def authorized(request: Request) -> Caller:
        return await plane_of(request).authorize(request, cached=cached)

    return Depends(authorized)


def generating(dialect: Dialect[BodyT]) -> Callable[[Request], Awaitable[Response]]:
    """Return what answers a request for `dialect` without the framework."""

    async def handle(request: Request) -> Response:
        plane = plane_of(request)
        caller = await plane.authorize(request, cached=True)
        return await plane.answer(request, caller, partial(plane.begin, dialect, request), dialect.names)

    return handle


def json_response(content: bytes, headers: dict[str, str] | None = None) -> Response:
    """Build the response of an encoded document."""
    return Response(content, media_type="application/json", headers=headers)
