"""A call of a silent Valkey ends on time; one whose reply comes after others, or was read late by this process, does not."""

import asyncio
import socket

import pytest
from tests.tenants.artificial_time import run, running_loop
from tests.tenants.counters.silence import reply_of

from loraplex.tenants.counters.pipelined_commands import (
    BUSY_SECONDS,
    GRACE_SECONDS,
    LATE_SECONDS,
    ReplyClock,
)


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
        return await reply_of(loop.sock_recv(mine, 1), 0.05, ReplyClock())


def test_a_wait_ends_at_its_deadline() -> None:
    async def scenario() -> float:
        with pytest.raises(TimeoutError):
            await reply_of(asyncio.Event().wait(), 0.05, ReplyClock())
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


async def wait_beside(replies: ReplyClock, *times: float) -> float:
    """Wait for a reply that never comes, beside others' at these times; return when the wait ended."""
    loop = running_loop()
    for at in times:
        loop.call_at(at, lambda: setattr(replies, "read_at", loop.time()))
    with pytest.raises(TimeoutError):
        await reply_of(asyncio.Event().wait(), 0.05, replies)
    return loop.time()


def test_only_silence_counts() -> None:
    assert run(wait_beside(ReplyClock(), 0.03, 0.07, 0.11)) == pytest.approx(0.16)


def test_a_reply_before_the_call_and_one_after_the_deadline_are_no_reason_to_wait() -> None:
    assert run(wait_beside(ReplyClock(read_at=-0.01), 0.051)) == pytest.approx(0.05)


def test_others_replies_extend_a_wait_to_a_bound() -> None:
    times = [0.04 * number for number in range(1, 100)]
    assert run(wait_beside(ReplyClock(), *times)) == pytest.approx(BUSY_SECONDS)


def test_a_late_loop_reads_others_replies_first() -> None:
    """It is blocked for 200 ms, then reads a reply to an earlier call: the server works on."""

    async def scenario() -> float:
        loop, replies = running_loop(), ReplyClock()

        def hold_up() -> None:
            loop.now += 0.2
            loop.call_soon(lambda: setattr(replies, "read_at", loop.time()))

        loop.call_later(0.01, hold_up)
        return await wait_beside(replies)

    assert run(scenario()) == pytest.approx(0.26)


@pytest.mark.parametrize("late", [False, True])
def test_a_reply_that_came_is_left_alone(late: bool) -> None:
    async def scenario() -> None:
        await reply_of(asyncio.sleep(0.04), 0.05, ReplyClock())
        if late:
            running_loop().now += 0.01 + 2 * LATE_SECONDS
        await asyncio.sleep(1.0)

    run(scenario())


def test_a_cancelled_caller_gets_no_timeout() -> None:
    async def scenario() -> None:
        waiting = asyncio.create_task(reply_of(asyncio.Event().wait(), 0.05, ReplyClock()))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(scenario())
