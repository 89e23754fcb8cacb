"""The measurement of throughput: the client's load is open and loses no response, and a rate counts only without an error."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from tests.benchmarks.open_loop_client import (
    CUT_OFF,
    NO_CONNECTION,
    OpenLoopClient,
    OpenLoopResult,
    encode_request,
)
from tests.benchmarks.throughput import Load, RateSearch, ThroughputShape, body_of, memory_figures

RESPONSE = b"HTTP/1.1 %d X\r\nContent-Length: 5\r\n\r\nhello"


@asynccontextmanager
async def server(status: int = 200, *, cuts: bool = False) -> AsyncIterator[tuple[int, list[int]]]:
    """A server on a free port that answers in two writes; the list has how many requests each connection sent."""
    counts: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own = len(counts)
        counts.append(0)
        while await reader.read(1 << 16):
            counts[own] += 1
            if cuts:
                break
            response = RESPONSE % status
            writer.write(response[:-3])
            await asyncio.sleep(0.001)
            writer.write(response[-3:])
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        yield listening.sockets[0].getsockname()[1], counts


async def sent(port: int, count: int, connections: int) -> OpenLoopResult:
    client = OpenLoopClient("127.0.0.1", port, connections)
    result = await client.send_at([encode_request("/", "key", b"{}")], [0.0] * count)
    client.close()
    return result


async def test_every_request_gets_its_response_over_few_connections() -> None:
    async with server() as (port, counts):
        result = await sent(port, 20, connections=4)
    assert len(result.latencies) == 20 and not result.errors
    assert sum(counts) == 20 and len(counts) == 4


async def test_requests_that_wait_for_a_connection_count_from_their_time() -> None:
    async with server() as (port, _):
        result = await sent(port, 10, connections=1)
    assert max(result.latencies) >= 10 * 0.001


async def test_failures_are_counted_by_their_kind() -> None:
    async with server(503) as (port, _):
        assert (await sent(port, 3, 2)).errors == {"503": 3}
    async with server(cuts=True) as (port, _):
        assert (await sent(port, 3, 3)).errors == {CUT_OFF: 3}
    assert (await sent(port, 2, 2)).errors == {NO_CONNECTION: 2}


@pytest.mark.parametrize("capacity", [430.0, 90.0])
async def test_the_search_ends_just_below_the_first_rate_that_fails(capacity: float) -> None:
    tried: list[float] = []

    async def send(rate: float, seconds: float, seed: int) -> Load:
        tried.append(rate)
        errors = Counter({"503": 1}) if rate > capacity else Counter[str]()
        return Load(rate, OpenLoopResult([0.001], errors), 0.0)

    found = await RateSearch(ThroughputShape(), send).run()
    assert capacity * 0.97 <= found <= capacity
    assert len(tried) == len({*tried})


def test_a_rate_holds_only_without_an_error_and_within_the_bound() -> None:
    shape, errors = ThroughputShape(p99_ms=10, engine_ms=5), Counter({"503": 1})

    def holds(result: OpenLoopResult) -> bool:
        return Load(1.0, result, shape.engine_ms / 1000).holds(shape)

    assert holds(OpenLoopResult([0.014]))
    assert not holds(OpenLoopResult([0.016]))
    assert not holds(OpenLoopResult([0.014], errors))


def test_the_slope_leaves_out_the_first_quarter() -> None:
    samples = [(float(second), 100.0 + 50 * min(second, 5) + second) for second in range(41)]
    figures = memory_figures(samples)
    assert figures["rss_slope_mib_per_min"] == pytest.approx(60.0)
    assert (figures["rss_start_mib"], figures["rss_end_mib"]) == (100.0, 390.0)


@pytest.mark.parametrize(("route", "field"), [("chat", "messages"), ("completions", "prompt")])
def test_bodies_have_what_their_route_reads(route: str, field: str) -> None:
    body: dict[str, Any] = msgspec.json.decode(body_of(ThroughputShape(route=route)))
    assert field in body and body["max_tokens"] == 4
