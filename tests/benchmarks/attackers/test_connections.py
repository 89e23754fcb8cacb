"""Each attack against the gateway's protocol before a stub application: it ends in time and reports what it did."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from tests.benchmarks.attackers.connections import ATTACKS

from loraplex.platform.server.connection_limiter import ConnectionLimiter
from loraplex.platform.server.http_protocol import BoundedHttpProtocol


async def refuse(request: Request) -> PlainTextResponse:
    return PlainTextResponse("no", 401)


async def document(request: Request) -> PlainTextResponse:
    return PlainTextResponse("a" * 200_000)


@pytest.fixture
async def base_url() -> AsyncIterator[str]:
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", refuse, methods=["POST"]),
            Route("/openapi.json", document),
        ]
    )
    protocol = partial(
        BoundedHttpProtocol, limiter=ConnectionLimiter(8, 8), stall_s=60.0, is_draining=lambda: False
    )
    config = uvicorn.Config(app, port=0, http=protocol, lifespan="off", log_level="critical")  # type: ignore[arg-type]
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = server.force_exit = True
    await task


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("large bodies", 401),
        ("drips after the answer", 401),
        ("idle connections", 503),
        ("unread answers", None),
    ],
)
async def test_an_attack_ends_in_time_and_reports(base_url: str, name: str, status: int | None) -> None:
    async with asyncio.timeout(10):
        result = await ATTACKS[name](base_url, "key", 1.0, 12)
    assert result.opened >= 12
    assert status is None or status in result.statuses
    assert (result.sent_bytes > 0) == (name != "idle connections")
