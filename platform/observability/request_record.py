"""What one HTTP request leaves for its access line, its metrics and its trace: facts and times, never content.

Invariant: who handles a request only writes to its record; observers read it once, when the request has ended, and the first
of them may add the id of its trace.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeAlias
from uuid import UUID

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.platform.observability.request_id import request_id_of
from loraplex.platform.observability.request_stats import RequestStats

UNMATCHED: Final = "none"
OTHER_METHOD: Final = "other"
METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
GENERATING: Final = frozenset(
    ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/decisions")
)
"""The handlers of requests that the engine works for."""
_RECORD: Final = "record"


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceCall:
    """What a checked inference request asks for. None: not given."""

    operation: str
    model: str
    response_id: str
    choices: int
    max_tokens: int | None
    temperature: float | None
    top_p: float | None


@dataclass(slots=True)
class RequestRecord:
    """`phases`: begin and end, on the monotonic clock, of what the gateway did with the request, by name; `causes`: what it
    waited for in them, in numbers and names of limits. `call` and `stats`
    are set for inference requests that came so far; `adapter_id` and `adapter_version` once the model is resolved to an adapter;
    `error_code` where the answer is an error, or a stream ended with one; `trace_id` where its span is recorded. `error_status` and
    `error_summary`, which has no content, are there behind `/v1`. `ledger_id`: of the row in the usage ledger that it has, or will
    have. `asked_model`: the model of a body that was refused.
    """

    phases: dict[str, tuple[float, float]] = field(default_factory=dict)
    causes: dict[str, dict[str, int | str]] = field(default_factory=dict)
    call: InferenceCall | None = None
    stats: RequestStats | None = None
    adapter_id: UUID | None = None
    adapter_version: int | None = None
    trace_id: str | None = None
    error_code: str | None = None
    error_status: int = 0
    error_summary: str | None = None
    ledger_id: UUID | None = None
    asked_model: object = None

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Take the time of a block as that of `phase`, however the block ends."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.phases[phase] = (began, time.monotonic())


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """A request that has ended. `began` and `ended` are on the monotonic clock. `status` None: it got no response.

    `handler` is the path of its route, with placeholders, and `method` one of `METHODS`, so both come from closed sets.
    `tenant_id` is None where no tenant was authenticated.
    """

    scope: Scope
    record: RequestRecord
    handler: str
    began: float
    ended: float
    status: int | None

    @property
    def request_id(self) -> str:
        return request_id_of(self.scope)

    @property
    def method(self) -> str:
        method: str = self.scope["method"]
        return method if method in METHODS else OTHER_METHOD

    @property
    def tenant_id(self) -> UUID | None:
        tenant_id: UUID | None = self.scope["state"].get("tenant_id")
        return tenant_id

    @property
    def key_id(self) -> str | None:
        """The public id of the key that was authenticated, if one was."""
        key_id: str | None = self.scope["state"].get("key_id")
        return key_id


RequestObserver: TypeAlias = Callable[[FinishedRequest], None]


class ObservedRequests:
    """ASGI middleware: gives each request a record and shows it to every observer when the request has ended."""

    def __init__(self, app: ASGIApp, observers: Sequence[RequestObserver] = ()) -> None:
        self._app = app
        self._observers = observers
        self._paths: dict[int, dict[int, str]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), None
        record = scope["state"][_RECORD] = RequestRecord()

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            ended = time.monotonic()
            note_authentication(scope)
            finished = FinishedRequest(
                scope=scope,
                record=record,
                handler=self._handler(scope),
                began=began,
                ended=ended,
                status=status,
            )
            for observe in self._observers:
                observe(finished)

    def _handler(self, scope: Scope) -> str:
        # The console is an application of its own within this one.
        app, found = scope["app"], scope.get("route", scope.get("endpoint"))
        if id(app) not in self._paths:
            self._paths[id(app)] = _paths(app)
        return self._paths[id(app)].get(id(found), UNMATCHED)


def _paths(app: FastAPI) -> dict[int, str]:
    """The paths of an application by its routes, and by the endpoints of those that the framework does not name in a scope."""
    contexts = [each for each in iter_route_contexts(app.routes) if each.path is not None]
    endpoints = {id(each.endpoint): str(each.path) for each in contexts}
    return endpoints | {id(each.original_route): str(each.path) for each in contexts}


def note_authentication(scope: Scope) -> None:
    """Add the authentication to the phases of the request, if it came so far."""
    span = scope["state"].get("auth_span")
    if span is not None:
        request_record_of(scope).phases["auth"] = span


def request_record_of(scope: Scope) -> RequestRecord:
    """Return the record that the middleware made."""
    record: RequestRecord = scope["state"][_RECORD]
    return record
