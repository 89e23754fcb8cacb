"""`/metrics` is rendered on a thread, at most once a second, once for all who ask meanwhile."""

import asyncio
import threading

import httpx
import pytest
from fastapi import FastAPI

from loraplex.platform.observability.exposition import RENDER_INTERVAL_S, MetricsExposition, metrics_router


class Rendering:
    """Counts its renderings and the threads they ran on; waits for `allowed`."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.allowed = threading.Event()
        self.error: Exception | None = None

    def __call__(self) -> bytes:
        self.threads.append(threading.get_ident())
        assert self.allowed.wait(60)
        if self.error is not None:
            raise self.error
        return b"rendering %d" % len(self.threads)


async def test_one_rendering_serves_all_who_ask_within_a_second() -> None:
    now, render = 100.0, Rendering()
    exposition = MetricsExposition(render, lambda: now)
    asked = [asyncio.create_task(exposition.text()) for _ in range(20)]
    while not render.threads:
        await asyncio.sleep(0.001)
    asked[0].cancel()
    render.allowed.set()
    texts = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(texts[0], asyncio.CancelledError) and set(texts[1:]) == {b"rendering 1"}
    assert render.threads != [threading.get_ident()]
    now += RENDER_INTERVAL_S / 2
    assert await exposition.text() == b"rendering 1"
    now += RENDER_INTERVAL_S
    assert await exposition.text() == b"rendering 2" and len(render.threads) == 2


async def test_a_failed_rendering_is_reported_and_repeated() -> None:
    render = Rendering()
    render.allowed.set()
    exposition = MetricsExposition(render)
    render.error = ValueError("broken collector")
    with pytest.raises(ValueError, match="broken collector"):
        await exposition.text()
    render.error = None
    assert await exposition.text() == b"rendering 2"


async def test_the_page_is_prometheus_text() -> None:
    app = FastAPI()
    app.include_router(metrics_router(MetricsExposition(lambda: b"up 1\n")))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        answer = await client.get("/metrics")
    assert answer.text == "up 1\n" and answer.headers["content-type"].startswith("text/plain; version=")
