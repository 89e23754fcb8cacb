"""`POST /console/token`: the bearer with which the console's scripts call the API.

Invariant: a token has a scope of its session's role, and leaves the server in a response that nothing stores.
"""

from datetime import UTC, datetime
from typing import Final, get_args

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from loraplex.platform.errors import ClientError, ErrorRow, InsufficientScope, InvalidParameter, describe
from loraplex.platform.observability.request_record import request_record_of
from loraplex.platform.web.console.endpoint import SignInNeeded
from loraplex.platform.web.console.form_routes import submission_of
from loraplex.tenants.people.console_keys import ConsoleToken, TokenScope, issue_console_token

SESSION_ENDED: Final = ClientError(
    ErrorRow(401, "authentication_error", "session_ended"), "Your session ended: sign in, then repeat this."
)


router = APIRouter()


@router.post("/console/token")
async def issue_token(request: Request) -> Response:
    """Give the console's own scripts a bearer for the API. Errors are JSON, as the API's."""
    try:
        issued = await _issue(request)
    except SignInNeeded:
        return refusal(request, SESSION_ENDED)
    except Exception as error:
        described = describe(error)
        if described.row.is_logged:
            raise
        return refusal(request, described)
    seconds = int((issued.expires_at - datetime.now(UTC)).total_seconds())
    return JSONResponse(
        {"api_key": issued.api_key, "expires_at": issued.expires_at.isoformat(), "expires_in": seconds},
        headers={"cache-control": "no-store"},
    )


async def _issue(request: Request) -> ConsoleToken:
    submission = await submission_of(request, None)
    session, scope = submission.session, token_scope(submission.form.text("scope"))
    if scope not in session.scopes:
        raise InsufficientScope(f"Your role has not the scope {scope}.", param=scope)
    return await submission.result(issue_console_token, session, scope)


def token_scope(text: str) -> TokenScope:
    """Parse the scope of a token. Raises `InvalidParameter`."""
    match text:
        case "inference" | "adapters:write":
            return text
    allowed = " or ".join(get_args(TokenScope))
    raise InvalidParameter(f"`scope` must be {allowed}.", param="scope")


def refusal(request: Request, error: ClientError) -> Response:
    """Build the response to a script that is refused: the error object of the API."""
    request_record_of(request.scope).error_code = error.row.code
    headers = {"cache-control": "no-store"}
    if error.row.retry_after_s is not None:
        headers["retry-after"] = str(error.row.retry_after_s)
    return JSONResponse(error.body(), error.row.status, headers)
