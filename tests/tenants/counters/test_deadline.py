"""A call that Valkey does not reply to ends on time; one whose reply this process was late to read does not."""

import asyncio
import socket

import pytest
from tests.tenants.artificial_time import run, running_loop

from loraplex.tenants.counters.deadline import GRACE_SECONDS, LATE_SECONDS, Deadline


async def held_up(*, answered: bool) -> bytes:
    """Wait 50 ms for a byte. The loop is blocked from 10 ms on for a second; the byte may arrive meanwhile."""
    loop = running_loop()
    mine, other = socket.socketpair()
    mine.setblocking(False)

    def hold_up() -> None:
        if answered:
            other.send(b"x")
        loop.now += 1.0

    loop.call_later(0.01, hold_up)
    with mine, other:
        async with Deadline(loop.time() + 0.05):
            return await loop.sock_recv(mine, 1)


def test_a_block_ends_at_its_deadline() -> None:
    async def scenario() -> float:
        with pytest.raises(TimeoutError):
            async with Deadline(running_loop().time() + 0.05):
                await asyncio.Event().wait()
        return running_loop().time()

    assert run(scenario()) == pytest.approx(0.05)


def test_a_late_loop_reads_its_sockets_first() -> None:
    assert run(held_up(answered=True)) == b"x"


def test_a_late_loop_waits_no_longer_than_a_moment() -> None:
    async def scenario() -> float:
        with pytest.raises(TimeoutError):
            await held_up(answered=False)
        return running_loop().time()

    assert run(scenario()) == pytest.approx(1.01 + GRACE_SECONDS)


@pytest.mark.parametrize("late", [False, True])
def test_a_block_that_ends_is_left_alone(late: bool) -> None:
    async def scenario() -> None:
        async with Deadline(running_loop().time() + 0.05):
            await asyncio.sleep(0.04)
        if late:
            running_loop().now += 0.01 + 2 * LATE_SECONDS
        await asyncio.sleep(1.0)

    run(scenario())


def test_a_cancelled_caller_gets_no_timeout() -> None:
    async def wait() -> None:
        async with Deadline(running_loop().time() + 0.05):
            await asyncio.Event().wait()

    async def scenario() -> None:
        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(scenario())
