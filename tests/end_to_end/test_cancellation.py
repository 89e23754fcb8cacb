"""Many clients disconnect at random stages: the engine keeps nothing of their requests."""

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.end_to_end.live_server import LiveServer, serving

from loraplex.engine.messages import EngineStats
from loraplex.platform.engines.event_buffer import EventBufferConfig
from loraplex.platform.engines.remote_client import RemoteEngine

CANCELS = 120
MANY_CANCELS = 300
"""With `--long`."""
AT_ONCE = 80
# Two of the three demo adapters fit, so that rows wait for loads; 8 rows run, so that most wait for a place.
CRAMPED = {"adapter_bytes": "2200000", "max_num_seqs": "8", "max_num_batched_tokens": "64"}


@pytest.fixture(scope="module")
def cramped(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("cramped")
    with serving(folder, demo_model, "--port", "0", settings=CRAMPED) as server:
        yield server
        server.stop()


@dataclass(frozen=True)
class Departure:
    """A request and when its client leaves: after `delay_s`, or after `events` lines of its stream."""

    body: dict[str, Any]
    key: str
    delay_s: float
    events: int | None


def departures(server: LiveServer, count: int, unit_s: float) -> list[Departure]:
    """`unit_s`: about what one short answer takes here, so that delays reach every stage on any machine."""
    draw = random.Random(3)
    owners = list(server.owners().items())
    return [departure(draw, server, unit_s, *draw.choice(owners)) for _ in range(count)]


def departure(draw: random.Random, server: LiveServer, unit_s: float, model: str, owner: int) -> Departure:
    long = draw.random() < 0.3
    question = f"{draw.random()} " + "Tell me about the sea. " * (100 if long else 1)
    stream = draw.random() < 0.5
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 1000,
        "n": draw.choice([1, 1, 1, 3]),
        "ignore_eos": True,
        "stream": stream,
    }
    events = draw.randrange(1, 6) if stream and draw.random() < 0.15 else None
    delay_s = draw.choice([0.2, 3.0, 10.0]) * unit_s * draw.random()
    return Departure(body, server.access.tenants[owner].api_key, delay_s, events)


def short_answer(server: LiveServer) -> float:
    """Its seconds."""
    began = time.monotonic()
    answer = server.client(0).chat.completions.create(
        model="pirate", messages=[{"role": "user", "content": "hello"}], max_tokens=3
    )
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    return time.monotonic() - began


async def leave(client: httpx.AsyncClient, places: asyncio.Semaphore, plan: Departure) -> None:
    async with places:
        asked = asyncio.create_task(ask(client, plan))
        _, pending = await asyncio.wait({asked}, timeout=None if plan.events else plan.delay_s)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert pending or plan.events, "the answer was complete before its client left"


async def ask(client: httpx.AsyncClient, plan: Departure) -> None:
    headers = {"authorization": f"Bearer {plan.key}"}
    async with client.stream("POST", "/v1/chat/completions", json=plan.body, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        count = 0
        async for line in answer.aiter_lines():
            count += bool(line)
            if count == plan.events:
                return


async def watch(engine: RemoteEngine, seen: list[EngineStats]) -> None:
    while True:
        seen.append(await engine.stats())
        await asyncio.sleep(0.05)


def busy(stats: EngineStats) -> int:
    return stats.running + stats.waiting + stats.referenced_blocks + stats.pinned_adapters


async def storm(
    server: LiveServer, count: int, unit_s: float
) -> tuple[list[EngineStats], EngineStats, float]:
    """The statistics seen meanwhile, the last ones, and how long after the last disconnect they arrived."""
    engine = RemoteEngine(server.engine_address, EventBufferConfig())
    engine.start()
    await engine.wait_ready()
    seen: list[EngineStats] = []
    watching = asyncio.create_task(watch(engine, seen))
    places = asyncio.Semaphore(AT_ONCE)
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=httpx.Limits()) as client:
            await asyncio.gather(*(leave(client, places, plan) for plan in departures(server, count, unit_s)))
            left = time.monotonic()
            while busy(last := await engine.stats()) and time.monotonic() - left < 60:
                await asyncio.sleep(0.02)
            return seen, last, time.monotonic() - left
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await engine.close()


def test_requests_of_disconnected_clients_leave_nothing(
    cramped: LiveServer, request: pytest.FixtureRequest
) -> None:
    count = MANY_CANCELS if request.config.getoption("--long") else CANCELS
    short_answer(cramped)
    unit_s = min(max(short_answer(cramped), 0.1), 0.5)
    before = cramped.engine_stats()
    seen, last, needed = asyncio.run(storm(cramped, count, unit_s))
    aborted = last.aborted_requests - before.aborted_requests
    print(
        f"\n{count} clients left, {aborted} of them with work in the engine; "
        f"all was given back {needed * 1000:.0f} ms after the last one"
    )
    assert max(stats.running for stats in seen) >= 2
    assert max(stats.waiting for stats in seen) > 8
    assert max(stats.waiting_for_adapter for stats in seen) > 0
    assert last.adapter_loads - before.adapter_loads >= 2
    assert busy(last) == 0, last
    assert needed <= 10.0
    assert last.free_blocks + last.cached_blocks == last.total_blocks
    assert aborted >= count // 10
    short_answer(cramped)
