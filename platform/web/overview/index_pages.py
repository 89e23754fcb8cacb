"""`/` in a browser: where the console, the documentation and the probes are. Invariant: it asks for no session and no store."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.web.console.endpoint import ConsoleEndpoint


def index_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the route of the page."""
    router = APIRouter()

    @router.get("/")
    async def index(request: Request) -> Response:
        response = endpoint.page(request, None, "index.html")
        response.headers["vary"] = "accept"
        return response

    return router
