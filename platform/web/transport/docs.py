"""`/docs`: the OpenAPI document as a page, and `/` for programs. Invariant: the page loads nothing from another server, so it is
readable offline.
"""

from functools import cache
from pathlib import Path
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from loraplex.platform.static_files import StaticFiles

STATIC: Final = Path(__file__).parent / "static"
STATIC_PREFIX: Final = "/docs/static"
PLACES: Final = {
    "api": "/v1",
    "docs": "/docs",
    "openapi": "/openapi.json",
    "liveness": "/livez",
    "readiness": "/readyz",
}
HEADERS: Final = {
    # Swagger UI draws with style attributes.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>loraplex API</title>
<link rel="icon" href="/favicon.ico" type="image/svg+xml">
<link rel="stylesheet" href="{style}">
<link rel="stylesheet" href="{contrast}">
<script src="{bundle}" defer></script>
<script src="{start}" type="module"></script>
</head>
<body>
<div id="docs"><noscript>This page draws <a href="/openapi.json">openapi.json</a>, which needs JavaScript.</noscript></div>
</body>
</html>
"""


def docs_router() -> APIRouter:
    """Build the routes of the page and its files."""
    static = _static()
    page = PAGE.format(
        style=static.url("swagger-ui.css"),
        contrast=static.url("docs.css"),
        bundle=static.url("swagger-ui-bundle.js"),
        start=static.url("docs.js"),
    )

    async def show(request: Request) -> Response:
        return HTMLResponse(page, headers=HEADERS)

    async def without_slash(request: Request) -> Response:
        return RedirectResponse("/docs", 303)

    router = APIRouter()
    router.add_route("/docs", show, include_in_schema=False)
    router.add_route("/docs/", without_slash, include_in_schema=False)
    router.add_route(f"{STATIC_PREFIX}/{{name:path}}", static.send, include_in_schema=False)
    return router


def index_router(*, console: bool) -> APIRouter:
    """Build `/`, where a browser gets the console's page if there is a `console`, and `/favicon.ico`, the icon of all pages."""
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


@cache
def _static() -> StaticFiles:
    """Read the files once for all applications of a process."""
    return StaticFiles(STATIC, STATIC_PREFIX)
