"""`/` for programs, where a browser gets the console's page, and `/favicon.ico`, the icon of all pages."""

from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from loraplex.platform.web.transport.docs import STATIC

PLACES: Final = {
    "api": "/v1",
    "docs": "/docs",
    "openapi": "/openapi.json",
    "liveness": "/livez",
    "readiness": "/readyz",
}


def index_router(*, console: bool) -> APIRouter:
    """Build both routes, without credentials. `console`: this server has one."""
    places = {"name": "loraplex", **PLACES, **({"console": "/console"} if console else {})}
    picture = (STATIC / "favicon.svg").read_bytes()

    async def index(request: Request) -> Response:
        return JSONResponse(places, headers={"vary": "accept"})

    async def icon(request: Request) -> Response:
        return Response(
            picture, headers={"cache-control": "public, max-age=86400"}, media_type="image/svg+xml"
        )

    router = APIRouter()
    router.add_route("/", index, include_in_schema=False)
    router.add_route("/favicon.ico", icon, include_in_schema=False)
    return router
