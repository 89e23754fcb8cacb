"""The response for people to every error of a page: what happened, what to do, and the request's id."""

from typing import Final

import structlog
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.errors import ClientError, ErrorRow, describe, unavailable_store
from loraplex.platform.observability.request_id import request_id_of
from loraplex.platform.observability.request_record import request_record_of
from loraplex.platform.web.console.endpoint import (
    ConsoleEndpoint,
    PageElsewhere,
    SignInNeeded,
    is_htmx,
    redirect,
    sign_in_address,
)
from loraplex.platform.web.console.forms import FormInvalid
from loraplex.platform.web.console.page import OpenPage
from loraplex.tenants.errors import LinkNotValid

LOG: Final = structlog.get_logger("loraplex.console")
USED_UP: Final = (
    "This link was used, has expired, or never was. If you have a password, sign in with it. If not, an admin of your team can "
    "send another link. On the server, `loraplex user reset EMAIL` prints one that sets a password, and "
    "`loraplex user create --operator` one for a new operator. Each start of `loraplex serve --demo` prints one for the demo's admin."
)
_NOT_FOUND: Final = ErrorRow(404, "invalid_request_error", "not_found")
_TITLES: Final = {
    400: "The request is not valid",
    403: "Not allowed",
    404: "Not found",
    405: "Not found",
    409: "Not possible now",
    412: "It has changed meanwhile",
    413: "Too large",
    421: "Not known by this name",
    422: "Not valid",
    429: "Limited",
    503: "Not available now",
}


class ErrorPages:
    """Answers an error with a page, or with a note where htmx asked for a part of one."""

    def __init__(self, endpoint: ConsoleEndpoint) -> None:
        self._endpoint = endpoint

    async def respond(self, request: Request, error: Exception) -> Response:
        """Return the response to an error before the first byte of another one."""
        if isinstance(error, SignInNeeded):
            return self._sign_in(request)
        if isinstance(error, PageElsewhere):
            return redirect(request, error.location)
        path, query = request.url.path, f"?{request.url.query}" if request.url.query else ""
        if isinstance(error, HTTPException) and request.method == "GET" and path.endswith("/"):
            return redirect(request, path.rstrip("/") + query)
        described = _described(error)
        request_record_of(request.scope).error_code = described.row.code
        if described.row.is_logged:
            LOG.error("page failed", request_id=request_id_of(request.scope), exc_info=error)
        if isinstance(error, HTTPException):
            await self._endpoint.session(request)
        session = getattr(request.state, "console_session", None)
        status = described.row.status
        title = _TITLES.get(status, "The server could not complete this")
        template = "errors/note.html" if is_htmx(request) else "errors/page.html"
        response = OpenPage(self._endpoint, request, session).show(
            template,
            status=status,
            title=title,
            error=described,
            store=unavailable_store(error),
            # Only what a reload does not send again is asked for again by itself.
            again=path + query if request.method == "GET" else None,
        )
        if described.row.retry_after_s is not None:
            response.headers["retry-after"] = str(described.row.retry_after_s)
        return response

    def _sign_in(self, request: Request) -> Response:
        if not is_htmx(request):
            return redirect(request, sign_in_address(request))
        page = OpenPage(self._endpoint, request, None)
        return page.show("errors/session_ended.html", status=401, sign_in=sign_in_address(request))


def _described(error: Exception) -> ClientError:
    if isinstance(error, HTTPException):
        status = 404 if error.status_code == 405 else error.status_code
        return ClientError(ErrorRow(status, "invalid_request_error", "not_found"), "There is no such page.")
    if isinstance(error, LinkNotValid):
        return ClientError(_NOT_FOUND, USED_UP)
    if isinstance(error, RequestValidationError):
        return ClientError(_NOT_FOUND, "There is nothing at this address.")
    if isinstance(error, FormInvalid):
        named = [f"Field {name}: {message}" if name else message for name, message in error.errors.items()]
        return ClientError(ErrorRow(422, "invalid_request_error", "invalid_value"), "; ".join(named))
    return describe(error)
