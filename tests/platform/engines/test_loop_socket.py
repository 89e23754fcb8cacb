"""A socket on the event loop, whose peer sends and reads at once."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
from tests.platform.engines.engine_socket import until

from loraplex.platform.engines.loop_socket import AT_ONCE, LoopSocket

ROUNDS = 10


@contextmanager
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        here, there = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        here.bind("inproc://here")
        there.connect("inproc://here")
        try:
            yield here, there
        finally:
            here.close(linger=0)
            there.close(linger=0)


async def test_messages_before_the_loop_watches_and_beyond_one_turn_are_read_in_order() -> None:
    heard: list[list[bytes]] = []
    sent = [[b"%d" % number, b"more"] for number in range(3 * AT_ONCE)]
    with pair() as (here, there):
        for message in sent:
            there.send_multipart(message)
        socket = LoopSocket(here, heard.append)
        await until(lambda: len(heard) == len(sent))
        assert heard == sent
        socket.close()


async def test_a_message_whose_signal_a_send_consumed_is_read() -> None:
    """After a pause a send looks at what came, and takes the signal of the descriptor with it."""
    heard: list[list[bytes]] = []
    with pair() as (here, there):
        socket = LoopSocket(here, heard.append)
        for number in range(1, ROUNDS + 1):
            await asyncio.sleep(0.001)
            there.send(b"%d" % number)
            time.sleep(0.01)  # noqa: ASYNC251  # the loop must not read meanwhile
            socket.send(b"answer")
            await until(lambda: len(heard) == number, within_s=10)  # noqa: B023  # awaited in its own round
        socket.close()


async def test_a_turn_reads_a_few_messages_also_where_each_is_answered() -> None:
    turns: list[int] = []

    def receive(frames: list[bytes]) -> None:
        turns[-1] += 1
        socket.send(b"answer")

    def turn() -> None:
        turns.append(0)
        if sum(turns) < 10 * AT_ONCE:
            asyncio.get_running_loop().call_soon(turn)

    with pair() as (here, there):
        for _ in range(10 * AT_ONCE):
            there.send(b"message")
        turn()
        socket = LoopSocket(here, receive)
        for _ in range(3):
            socket.send(b"another")
        await until(lambda: sum(turns) == 10 * AT_ONCE)
        # The descriptor may tell of messages in a turn that reads already.
        assert max(turns) <= 2 * AT_ONCE
        socket.close()


async def test_a_message_that_fails_does_not_stop_those_behind_it(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[bytes] = []

    def receive(frames: list[bytes]) -> None:
        heard.extend(frames)
        if frames == [b"bad"]:
            raise ValueError("bad")

    with pair() as (here, there):
        for message in (b"first", b"bad", b"last"):
            there.send(message)
        socket = LoopSocket(here, receive)
        await until(lambda: len(heard) == 3)
        assert "ValueError: bad" in caplog.text
        socket.close()


async def test_a_function_that_closes_the_socket_gets_no_more() -> None:
    heard: list[bytes] = []

    def receive(frames: list[bytes]) -> None:
        heard.extend(frames)
        socket.close()

    with pair() as (here, there):
        there.send(b"first")
        there.send(b"second")
        socket = LoopSocket(here, receive)
        await until(lambda: here.closed)
        await asyncio.sleep(0.05)
        assert heard == [b"first"]
        with pytest.raises(zmq.ZMQError):
            socket.send(b"late")
        socket.close()


async def test_a_full_queue_refuses_a_message_and_takes_a_later_one() -> None:
    with pair() as (here, there):
        here.set_hwm(1)
        socket = LoopSocket(here, lambda frames: None)
        with pytest.raises(zmq.Again):
            for _ in range(10_000):
                socket.send(b"message")
        assert there.recv() == b"message"
        while there.poll(0):
            there.recv()
        socket.send(b"later")
        assert there.recv() == b"later"
        socket.close()
