"""Bodies that are too large, stall, are too slow or end early."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from loraplex.adapters.limits import UploadConfig
from loraplex.platform.errors import BodyTimeout, BodyTooLarge, ClientGone
from loraplex.platform.web.transport.body_stream import BodyChunks, read_timeout

FAST = UploadConfig(stall_s=0.1, grace_s=0.2, min_bytes_per_s=1000, body_s=0.5)


def request(messages: AsyncIterator[dict[str, Any]], length: str | None = None) -> Request:
    headers = [] if length is None else [(b"content-length", length.encode())]
    return Request({"type": "http", "method": "PUT", "headers": headers}, lambda: anext(messages))


async def sending(*chunks: bytes, every_s: float = 0.0, end: bool = True) -> AsyncIterator[dict[str, Any]]:
    for chunk in chunks:
        await asyncio.sleep(every_s)
        yield {"type": "http.request", "body": chunk, "more_body": True}
    if end:
        yield {"type": "http.request", "body": b"", "more_body": False}
    await asyncio.sleep(60)


async def read(request: Request, most: int = 1000, limits: UploadConfig = FAST) -> bytes:
    return b"".join([chunk async for chunk in BodyChunks(request, most, limits)])


async def test_a_body_arrives() -> None:
    assert await read(request(sending(b"ab", b"", b"cd"))) == b"abcd"
    assert await read(request(sending(b"a" * 1000), "1000")) == b"a" * 1000


@pytest.mark.parametrize("length", ["1001", "9" * 30])
async def test_a_declared_size_is_refused_before_a_byte_is_read(length: str) -> None:
    with pytest.raises(BodyTooLarge):
        await read(request(sending(end=False), length))


async def test_bytes_are_counted_independently_of_the_declared_size() -> None:
    with pytest.raises(BodyTooLarge):
        await read(request(sending(b"a" * 600, b"a" * 401), "10"))


async def test_a_stalled_body_ends() -> None:
    with pytest.raises(BodyTimeout):
        await asyncio.wait_for(read(request(sending(b"a", end=False))), 60)


async def test_a_slow_body_ends() -> None:
    trickle = sending(*[b"a"] * 100, every_s=0.02)
    with pytest.raises(BodyTimeout):
        await asyncio.wait_for(read(request(trickle)), 60)


async def test_a_client_that_leaves() -> None:
    async def leaving() -> AsyncIterator[dict[str, Any]]:
        yield {"type": "http.request", "body": b"a", "more_body": True}
        yield {"type": "http.disconnect"}

    with pytest.raises(ClientGone):
        await read(request(leaving()))


@given(st.floats(0, 10_000), st.integers(0, 10**10))
def test_the_read_timeout_is_bounded_and_grows_with_the_received_bytes(elapsed: float, received: int) -> None:
    limits = UploadConfig()
    assert read_timeout(elapsed, received, limits) <= limits.stall_s
    assert read_timeout(elapsed, received + 1, limits) >= read_timeout(elapsed, received, limits)
    assert read_timeout(limits.body_s + elapsed, received, limits) <= 0
