"""`/` in a browser: where the console, the documentation and the probes are. Invariant: it asks for no session and no store."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.web.console.page import OpenPage

router = APIRouter()


@router.get("/")
async def index(request: Request) -> Response:
    response = OpenPage(request.app.state.endpoint, request, None).show("index.html")
    response.headers["vary"] = "accept"
    return response
