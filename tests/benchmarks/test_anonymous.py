"""The measurement of clients without credentials: no route is overlooked, a flood names its networks, and a run has its figures."""

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount
from starlette.routing import Route as StarletteRoute
from tests.benchmarks import anonymous
from tests.benchmarks.anonymous import (
    CALLBACK,
    FIRST,
    START,
    AnonymousShape,
    Route,
    measure_anonymous,
    routes_of,
)

from loraplex.platform.bench.report import BenchFailed
from loraplex.platform.console.app import ConsoleRoute


async def answer(request: Request) -> Response:
    return Response()


def test_routes_of_routers_mounts_and_the_console_are_found() -> None:
    app, console = FastAPI(openapi_url=None), FastAPI(openapi_url=None)
    router = APIRouter(prefix="/in")
    router.add_api_route("/router/{key_id}", answer, methods=["GET", "PATCH"])
    app.include_router(router, prefix="/a")
    console.add_route("/console/static/{name:path}", answer)
    app.router.routes.append(ConsoleRoute(console))
    app.mount("/mounted", FastAPI(openapi_url=None, routes=[StarletteRoute("/leaf", answer)]))
    app.router.routes.append(
        Mount("/files", routes=[StarletteRoute("/{number:int}", answer, methods=["PUT"])])
    )
    assert [route.name for route in routes_of(app)] == [
        "GET /a/in/router/{key_id}",
        "PATCH /a/in/router/{key_id}",
        "GET /console/static/{name:path}",
        "PUT /files/{number:int}",
        "GET /mounted/leaf",
    ]
    assert Route("GET", "/a/{key_id}/{version}").filled == "/a/00000000-0000-0000-0000-000000000001/1"


def test_a_route_of_an_unknown_kind_ends_the_run() -> None:
    class Hidden(BaseRoute):
        pass

    app = FastAPI()
    app.router.routes.append(Hidden())
    with pytest.raises(BenchFailed, match="Hidden"):
        routes_of(app)


@pytest.mark.long
async def test_a_run_has_figures_of_sign_ins_and_starts() -> None:
    shape = AnonymousShape(part="/oidc/", requests=20, starts=20, rate=20.0, seconds=1.0, rounds=1)
    report = await measure_anonymous(shape, print)
    figures = {case.name: case.figure for case in report.cases}
    assert {*figures} == {
        *(f"GET {path}" for path in (START, CALLBACK, f"{CALLBACK} after its start")),
        "POST /console/oidc/accept",
        "20 starts beside 20 completions/s",
    }
    # Every start is the same document, and half of a network's tries are callbacks, each a call to the provider.
    assert figures[f"GET {START}"]["statuses"] == "429x20" and figures[f"GET {START}"]["outbound"] <= 1
    come_back = figures[f"GET {CALLBACK} after its start"]
    assert 0 < come_back["outbound"] <= FIRST / 2 < 20 + FIRST and come_back["outbound_networks"] == 20
    assert figures["20 starts beside 20 completions/s"]["p99_ms"] > 0
    assert all(0 <= ratio.value for ratio in report.ratios)


def test_a_network_is_used_once() -> None:
    sources = anonymous.networks()
    addresses = {httpx.Headers(next(sources))["x-forwarded-for"] for _ in range(300)}
    assert len(addresses) == 300 and {"10.0.0.1", "10.0.1.44"} <= addresses
