"""A thousand requests at once keep no probe from its answer, and cost the gateway none of them."""

import asyncio
import json
import time
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.platform.engines.managed_engine import Managed

from loraplex.engine.fake_engine import FakeScript, Fault
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.observability.health import Health, health_router
from loraplex.platform.observability.metrics import Metrics

FLOOD = 1000
PROBE_S = 10.0
"""Ten times what the gateway promises: client and server share this process, and the machine is busy."""


async def answered(host: str, port: int, request: bytes, begun: asyncio.Semaphore) -> bytes:
    """The status line of the response to a request on a connection of its own."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request)
    begun.release()
    try:
        return await reader.readline()
    finally:
        writer.close()


@pytest.mark.long
async def test_livez_answers_beside_a_thousand_requests(start_gateway: Any) -> None:
    gateway = await start_gateway(FakeScript(faults=(Fault(kind="stall"),)))
    pool = EnginePool([Managed()])
    health = Health(engines=pool, dependencies={}, metrics=Metrics("m", "1", 100, pool))
    gateway.app.include_router(health_router(health))
    address, begun = urlsplit(gateway.url), asyncio.Semaphore(0)
    body = json.dumps({"model": "demo/base", "prompt": [3, 4], "max_tokens": 1, "n": 1}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {gateway.key}\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    flood = [
        asyncio.create_task(answered(str(address.hostname), int(address.port or 0), request, begun))
        for _ in range(FLOOD)
    ]
    await begun.acquire()
    waits: list[float] = []
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        for number in count():
            began = time.perf_counter()
            assert (await client.get("/livez")).status_code == 200
            waits.append(time.perf_counter() - began)
            if gateway.engine.running == FLOOD and number >= 20:
                break
    for each in flood:
        each.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    assert max(waits) < PROBE_S, sorted(waits)[-5:]
