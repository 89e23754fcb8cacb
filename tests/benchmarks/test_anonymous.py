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
    COME_BACK,
    FIRST,
    START,
    AnonymousShape,
    Route,
    bounds,
    measure_anonymous,
    routes_of,
)

from loraplex.platform.bench.report import BenchFailed, Case
from loraplex.platform.web.console_app import ConsoleRoute


async def answer(request: Request) -> Response:
    return Response()


def test_routes_of_routers_mounts_and_the_console_are_found() -> None:
    app, console = FastAPI(openapi_url=None), FastAPI(openapi_url=None)
    router = APIRouter(prefix="/in")
    router.add_api_route("/router/{key_id}", answer, methods=["GET", "PATCH"])
    app.include_router(router, prefix="/a")
    console.add_route("/console/static/{name:path}", answer)
    app.router.routes.insert(0, ConsoleRoute(console))
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
        *(f"GET {path}" for path in (START, CALLBACK)),
        COME_BACK,
        "POST /console/oidc/accept",
        "20 starts beside 20 completions/s",
    }
    # Every start is the same document, and half of a network's tries are callbacks, each a call to the provider.
    assert figures[f"GET {START}"]["statuses"] == "429x20" and figures[f"GET {START}"]["outbound"] <= 1
    come_back = figures[COME_BACK]
    assert 0 < come_back["outbound"] <= FIRST / 2 < 20 + FIRST and come_back["outbound_networks"] == 20
    assert figures["20 starts beside 20 completions/s"]["p99_ms"] > 0
    assert all(0 <= ratio.value for ratio in report.ratios)


@pytest.mark.parametrize(
    ("name", "figure", "broken"),
    [
        ("GET /a", {}, []),
        ("GET /a", {"cpu_ms": 6.0}, ["ms of CPU of the dearest: GET /a"]),
        ("GET /a", {"cpu_ms_networks": 6.0}, ["ms of CPU of the dearest: GET /a"]),
        ("GET /a", {"cpu_ms_first": 6.0}, ["ms of CPU of the dearest: GET /a"]),
        ("POST /console/sign-in", {"cpu_ms_first": 60.0}, []),
        ("POST /operator/console/sign-in", {"cpu_ms_first": 60.0}, []),
        (
            "POST /console/sign-in",
            {"cpu_ms_networks": 6.0},
            ["ms of CPU of the dearest: POST /console/sign-in"],
        ),
        ("GET /a", {"outbound": 2}, [f"outbound calls of GET, but for {COME_BACK}"]),
        ("GET /a", {"outbound_networks": 2}, [f"outbound_networks calls of GET, but for {COME_BACK}"]),
        ("POST /a", {"outbound": 2}, []),
        (COME_BACK, {"outbound": 2, "outbound_networks": 2}, []),
    ],
)
def test_every_flood_has_bounds(name: str, figure: dict[str, float], broken: list[str]) -> None:
    cheap = {
        "cpu_ms": 1.0,
        "cpu_ms_networks": 1.0,
        "cpu_ms_first": 1.0,
        "outbound": 0,
        "outbound_networks": 0,
    }
    cases = [Case("GET /b", {}, cheap), Case(name, {}, cheap | figure)]
    assert [ratio.name for ratio in bounds(cases) if ratio.holds is False] == broken


def test_a_network_is_used_once() -> None:
    sources = anonymous.networks()
    addresses = {httpx.Headers(next(sources))["x-forwarded-for"] for _ in range(300)}
    assert len(addresses) == 300 and {"10.0.0.1", "10.0.1.44"} <= addresses
