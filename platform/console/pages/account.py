"""A person's own account: `/console/account`."""

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.console.endpoint import ConsoleEndpoint
from loraplex.platform.services.people.identity import ConsoleSession


def account_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes of the account page."""
    router = APIRouter()
    signed_in = Depends(endpoint.requires())

    @router.get("/console/account")
    async def account(request: Request, session: Annotated[ConsoleSession, signed_in]) -> Response:
        return endpoint.page(request, session, "account/account.html")

    return router
