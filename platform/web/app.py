"""The gateway's HTTP application: routers, request ids, and the conversion of every error into a response."""

from collections.abc import Sequence
from functools import partial

import msgspec
import structlog
from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from loraplex.adapters.errors import AdaptersError
from loraplex.engine.errors import EngineError
from loraplex.grammar.errors import GrammarError
from loraplex.platform.auth.authenticator import Authenticator
from loraplex.platform.error_boundary import ErrorBoundary
from loraplex.platform.errors import ClientError, ErrorRow, GatewayError, describe
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.inference.rate_limit_headers import LEVEL_HEADER, LIMIT_HEADER, RETRY_HEADER
from loraplex.platform.observability.failed_requests import FailureObserver, note_error
from loraplex.platform.observability.request_id import HEADER, RequestIds, request_id_of
from loraplex.platform.observability.request_record import (
    ObservedRequests,
    RequestObserver,
    request_record_of,
)
from loraplex.platform.web import operator_plane, tenant_plane
from loraplex.platform.web.adapters.upload_receiver import UploadReceiver
from loraplex.platform.web.anthropic import routes as anthropic
from loraplex.platform.web.anthropic.errors import client_headers, described, error_document, is_anthropic
from loraplex.platform.web.evaluations.execution import EvaluationExecution
from loraplex.platform.web.evaluations.own_requests import OwnRequests
from loraplex.platform.web.inference_plane import InferencePlane
from loraplex.platform.web.openai import routes as openai
from loraplex.platform.web.openai.missing_endpoints import instead_of
from loraplex.platform.web.openapi import Application
from loraplex.platform.web.planes import Planes
from loraplex.platform.web.transport.body_budget import BodyBudget
from loraplex.platform.web.transport.cross_origin import CrossOrigin
from loraplex.platform.web.transport.direct_routes import DirectRoutes
from loraplex.platform.web.transport.docs import docs_router
from loraplex.platform.web.transport.head_requests import HeadRequests
from loraplex.tenants.errors import TenantsError

LOG = structlog.get_logger("loraplex.gateway")


def create_app(
    dependencies: GatewayDependencies,
    routers: Sequence[APIRouter] = (),
    observers: Sequence[RequestObserver] = (),
) -> Application:
    """Build the application: inference, tenant and operator plane, and `routers`. Its documentation is at `/docs`.

    `observers` see every request when it has ended.
    """
    app = Application(title="loraplex", redirect_slashes=False, docs_url=None, redoc_url=None)
    app.models = openai.DOCUMENTED_MODELS
    authenticator = Authenticator(
        dependencies.database,
        dependencies.config.key_cache_s,
        known_s=dependencies.config.known_caller_s,
        require_policy=dependencies.admission_controller.require_policy,
        addresses=dependencies.addresses,
        key_use=dependencies.key_use,
    )
    dependencies.admission_controller.on_policy_outdated = authenticator.forget
    app.state.body_budget = BodyBudget(dependencies.config.max_buffered_body_bytes)
    app.state.inference = InferencePlane(dependencies, authenticator)
    app.include_router(openai.router)
    app.include_router(anthropic.router)
    app.state.planes = planes = Planes(dependencies, authenticator)
    app.state.upload_receiver = UploadReceiver(dependencies.uploads.in_turns(planes.runner.slot))
    app.include_router(tenant_plane.router)
    app.include_router(operator_plane.router)
    app.include_router(docs_router())
    for router in routers:
        app.include_router(router)
    for error in (GatewayError, EngineError, AdaptersError, GrammarError, TenantsError):
        app.add_exception_handler(error, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_middleware(HeadRequests)
    failures = FailureObserver(dependencies.admission_controller.note_failure, dependencies.served_model_name)
    observers = (*observers, failures)
    around = partial(_around, observers=observers, origins=dependencies.config.allowed_origins)
    app.add_middleware(around)
    app.state.evaluations = EvaluationExecution(planes, OwnRequests(app, around))
    app.direct = DirectRoutes(openai.DIRECT | anthropic.DIRECT, around)
    return app


def _around(app: ASGIApp, observers: Sequence[RequestObserver], origins: Sequence[str]) -> ASGIApp:
    """What every request passes, also one of a direct route."""
    answering: ASGIApp = ErrorBoundary(app, _on_error)
    if origins:
        answering = CrossOrigin(answering, origins)
    return RequestIds(ObservedRequests(answering, observers))


async def _on_error(request: Request, error: Exception) -> Response:
    client_error = described(error) if is_anthropic(request) else describe(error)
    note_error(request_record_of(request.scope), error, client_error.row)
    if client_error.row.is_logged:
        LOG.error(
            "request failed",
            request_id=request_id_of(request.scope),
            code=client_error.row.code,
            exc_info=error,
        )
    return error_response(request, client_error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Respond to a path or method that does not exist."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "invalid_request")
    row = ErrorRow(status, "invalid_request_error", code)
    request_record_of(request.scope).error_code = code
    path = request.scope["path"]
    instead = instead_of(path) if status == 404 else None
    message = f"{request.method} {path[:200]}: {code.replace('_', ' ')}"
    return error_response(request, ClientError(row, f"{message}; {instead}" if instead else message))


def error_response(request: Request, error: ClientError) -> Response:
    """Build the JSON response to an error that occurred before the first byte of a response, in the shape of its path."""
    headers, document = {}, error.body()
    if is_anthropic(request):
        request_id = request_id_of(request.scope)
        headers = client_headers(request.headers, {HEADER: request_id})
        document = error_document(error, request_id)
    if error.row.retry_after_s is not None:
        headers["retry-after"] = str(error.row.retry_after_s)
    if error.row.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.limit is not None:
        headers[LIMIT_HEADER], headers[LEVEL_HEADER] = error.limit
    if not error.row.repeatable:
        headers[RETRY_HEADER] = "false"
    content = msgspec.json.encode(document)
    return Response(content, error.row.status, headers=headers, media_type="application/json")
