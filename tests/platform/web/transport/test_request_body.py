"""JSON bodies are read within bounds of memory and pace; those of many values are checked in a worker before they are parsed."""

import asyncio
import json
import tracemalloc
from collections import Counter
from uuid import UUID

import pytest
from starlette.requests import Request

from loraplex.platform.errors import BodyTimeout, InvalidBody, ShareExceeded
from loraplex.platform.parameters.json_object import BodyLimits
from loraplex.platform.web.transport import request_body
from loraplex.platform.web.transport.body_budget import CHUNKS_PER_ITERATION, BodyBudget, BodyLease
from loraplex.platform.web.transport.request_body import LARGE_BODY, MANY_VALUES, read_object


def requested(*chunks: bytes, every_s: float | None = None, length: bytes | None = None) -> Request:
    left = list(chunks)

    async def receive() -> dict[str, object]:
        if every_s is not None:
            await asyncio.sleep(every_s)
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    headers = [] if length is None else [(b"content-length", length)]
    return Request({"type": "http", "headers": headers}, receive)


def lease_of(total: int = 1 << 30) -> BodyLease:
    return BodyLease(BodyBudget(total), UUID(int=1))


async def unchecked(body: bytes) -> None:
    raise AssertionError("a small body needs no worker")


@pytest.mark.parametrize(
    ("body", "in_worker"),
    [
        (json.dumps({"a": [0] * (MANY_VALUES - 2)}).encode(), False),
        (json.dumps({"a": [0] * MANY_VALUES}).encode(), True),
        (json.dumps({"a": [[]] * MANY_VALUES}).encode(), True),
        (json.dumps({"a": [{}] * MANY_VALUES}).encode(), True),
        (json.dumps({str(name): 0 for name in range(MANY_VALUES + 1)}).encode(), True),
        (json.dumps({"a": "b" * 2 * LARGE_BODY}).encode(), False),
        (b"{}", False),
    ],
)
async def test_bodies_of_many_values_are_checked_in_a_worker(body: bytes, in_worker: bool) -> None:
    checked: list[bytes] = []

    async def check_in_worker(data: bytes) -> None:
        checked.append(data)

    parsed = await read_object(requested(body), BodyLimits(), dict, check_in_worker, lease_of())
    assert parsed == json.loads(body) and checked == [body] * in_worker


async def test_a_refusal_of_the_worker_is_raised() -> None:
    async def refuse(data: bytes) -> None:
        raise InvalidBody("no")

    with pytest.raises(InvalidBody, match="no"):
        await read_object(requested(b"[" * 2 * MANY_VALUES), BodyLimits(), dict, refuse, lease_of())


async def test_memory_is_taken_as_the_body_arrives() -> None:
    lease = lease_of(total=4 * 1000)
    with pytest.raises(ShareExceeded):
        await read_object(requested(b"{" + b" " * 900, b" " * 900), BodyLimits(), dict, unchecked, lease)
    lease.release()
    assert await read_object(requested(b"{" + b" " * 900, b"}"), BodyLimits(), dict, unchecked, lease) == {}
    with pytest.raises(ShareExceeded):
        lease.grow(100)


async def test_a_body_whose_declared_size_does_not_fit_is_refused_by_its_first_chunk() -> None:
    lease, size = lease_of(total=4 * 1000), b"2000"
    with pytest.raises(ShareExceeded):
        await read_object(requested(b"{", b"}", length=size), BodyLimits(), dict, unchecked, lease)
    lease.require(1000)


async def test_a_refusal_is_sent_late_and_its_body_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    size, slept = 2 << 20, []
    lease = lease_of(total=4 * (size + 1))

    async def sleep(seconds: float) -> None:
        slept.append((seconds, tracemalloc.get_traced_memory()[0] < size))
        lease.require(size)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(request_body, "LARGE_BODY", 2 * size)
    tracemalloc.start()
    try:
        with pytest.raises(ShareExceeded):
            await read_object(requested(b" " * size, b"  "), BodyLimits(), dict, unchecked, lease)
    finally:
        tracemalloc.stop()
    assert slept == [(request_body.REFUSAL_DELAY_S, True)]


async def test_a_body_that_drips_does_not_keep_its_memory() -> None:
    limits = BodyLimits(body_s=60.0, stall_s=60.0, grace_s=0.1, min_bytes_per_s=1000)
    async with asyncio.timeout(60):
        with pytest.raises(BodyTimeout):
            await read_object(requested(*[b" "] * 1000, every_s=0.02), limits, dict, unchecked, lease_of())


async def test_many_large_bodies_of_a_tenant_leave_the_event_loop_to_others() -> None:
    budget, iteration, reads = BodyBudget(1 << 30), 0, Counter[int]()

    async def count_iterations() -> None:
        nonlocal iteration
        while True:
            iteration += 1
            await asyncio.sleep(0)

    def body() -> Request:
        left = 20

        async def receive() -> dict[str, object]:
            nonlocal left
            reads[iteration] += 1
            left -= 1
            return {"type": "http.request", "body": b" " * LARGE_BODY, "more_body": left > 0}

        return Request({"type": "http", "headers": []}, receive)

    async def read(tenant_id: UUID) -> None:
        with pytest.raises(InvalidBody), budget.lease(tenant_id) as lease:
            await read_object(body(), BodyLimits(), dict, unchecked, lease)

    counting = asyncio.create_task(count_iterations())
    await asyncio.sleep(0)
    await asyncio.gather(*(read(UUID(int=1)) for _ in range(12)))
    counting.cancel()
    first, *others = sorted(reads.values(), reverse=True)
    assert first <= 2 * 12 and max(others) <= CHUNKS_PER_ITERATION
