"""Both ends of the engine socket, over a real unix socket."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from loraplex.engine.fake_engine import FakeEngine
from loraplex.engine.messages import (
    EngineRequest,
    Event,
)
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.engines.event_buffer import EventBufferConfig
from loraplex.platform.engines.remote_client import RemoteEngine
from loraplex.platform.engines.server import EngineServer


def request(request_id: str = "r", max_tokens: int = 8, n: int = 1) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, n=n, seed=1)
    return EngineRequest(
        request_id=request_id, namespace=b"n" * 32, prompt_token_ids=[1, 2], sampling=sampling
    )


async def collect(engine: RemoteEngine, engine_request: EngineRequest) -> list[Event]:
    return [event async for event in engine.submit(engine_request)]


async def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(fake: FakeEngine, address: str) -> AsyncIterator[EngineServer]:
    server = EngineServer(fake, address)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def connected(address: str, limits: EventBufferConfig | None = None) -> AsyncIterator[RemoteEngine]:
    async with started(RemoteEngine(address, limits or EventBufferConfig())) as client:
        await asyncio.wait_for(client.wait_ready(), 60)
        yield client


@asynccontextmanager
async def started(client: RemoteEngine) -> AsyncIterator[RemoteEngine]:
    """Close it also when the test fails: a context that is collected with its socket would wait for ever."""
    client.start()
    try:
        yield client
    finally:
        await client.close()
