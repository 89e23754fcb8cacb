"""Commands of concurrent callers on one connection: each gets its own reply, and a late or lost connection is replaced."""

import asyncio
from pathlib import Path
from random import Random

import hiredis
import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from loraplex.tenants.counters import pipelined_commands
from loraplex.tenants.counters.pipelined_commands import PipelinedCommands
from loraplex.tenants.valkey import FAILURES, open_valkey


async def connections(client: Redis) -> int:
    """How many connections the server has accepted so far."""
    found: int = (await client.info("stats"))["total_connections_received"]
    return found


async def test_concurrent_callers_get_their_own_replies_over_one_connection(client: Redis) -> None:
    commands = PipelinedCommands(client)
    before = await connections(client)
    replies = await asyncio.gather(*(commands.run(10, ("ECHO", f"{number}")) for number in range(500)))
    assert replies == [b"%d" % number for number in range(500)]
    assert await connections(client) <= before + 1


async def test_the_clock_has_the_time_of_every_reply(client: Redis) -> None:
    commands = PipelinedCommands(client)
    begun = asyncio.get_running_loop().time()
    await commands.run(10, ("ECHO", "a"))
    pipe = commands._pipe
    assert pipe is not None
    first = pipe.replied.read_at
    assert first >= begun
    with pytest.raises(ResponseError):
        await commands.run(10, ("ECHO",))
    assert pipe.replied.read_at > first


async def test_an_error_reply_concerns_its_caller_alone(client: Redis) -> None:
    commands = PipelinedCommands(client)
    replies = await asyncio.gather(
        *(commands.run(10, each) for each in (("ECHO", "a"), ("ECHO",), ("ECHO", "b"))),
        return_exceptions=True,
    )
    assert (replies[0], replies[2]) == (b"a", b"b") and isinstance(replies[1], ResponseError)


async def test_a_late_reply_costs_its_caller_the_deadline_and_others_nothing(client: Redis) -> None:
    commands = PipelinedCommands(client)
    await commands.run(10, ("ECHO", "open"))
    await client.client_pause(400, all=False)
    patient = asyncio.create_task(commands.run(30, ("SET", "pipelined", 1)))
    with pytest.raises(TimeoutError):
        await commands.run(0.05, ("SET", "pipelined", 2))
    # The next caller has a connection of its own, and the first one still gets its reply.
    assert await commands.run(10, ("ECHO", "next")) == b"next"
    assert await patient == b"OK"


async def test_replies_of_the_next_connection_prolong_no_wait_on_a_silent_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first connection is silent after its handshake, as one that the network has lost; the others answer."""
    monkeypatch.setattr(pipelined_commands, "BUSY_SECONDS", 3600.0)
    monkeypatch.setattr(pipelined_commands, "CLOSE_SECONDS", 3600.0)
    connected: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(writer)
        is_silent, received = len(connected) == 1, hiredis.Reader()
        while data := await reader.read(1 << 16):
            received.feed(data)
            while command := received.gets():
                if not (is_silent and command[0] == b"ECHO"):
                    writer.write(b"+OK\r\n")
        writer.close()

    server = await asyncio.start_unix_server(answer, tmp_path / "lost.sock")
    client = open_valkey(f"unix://{tmp_path}/lost.sock?protocol=2", command_s=60)
    assert isinstance(client, Redis)
    commands = PipelinedCommands(client)
    patient = asyncio.create_task(commands.run(0.5, ("ECHO", "patient")))
    with pytest.raises(TimeoutError):
        await commands.run(0.05, ("ECHO", "impatient"))
    async with asyncio.timeout(60):
        while not patient.done():
            assert await commands.run(30, ("ECHO", "next")) == b"OK"
            await asyncio.sleep(0.01)
    assert isinstance(patient.exception(), TimeoutError)
    await client.aclose()
    server.close()
    await server.wait_closed()


async def test_a_lost_connection_fails_who_waits_and_is_replaced(client: Redis) -> None:
    commands = PipelinedCommands(client)
    own = await commands.run(10, ("CLIENT", "ID"))
    waiting = asyncio.create_task(commands.run(60, ("BLPOP", "never", 0)))
    await asyncio.sleep(0.01)
    await client.client_kill_filter(_id=own)
    with pytest.raises(FAILURES):
        await waiting
    assert await commands.run(10, ("CLIENT", "ID")) != own


async def test_closing_the_client_ends_the_connection(client: Redis) -> None:
    commands = PipelinedCommands(client)
    waiting = asyncio.create_task(commands.run(60, ("BLPOP", "never", 0)))
    while not await client.client_list():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    await client.aclose()
    with pytest.raises(FAILURES):
        await waiting


async def test_whatever_ends_a_caller_no_other_gets_its_reply(client: Redis) -> None:
    """Callers are cancelled, late, or lose their connection; each of the others gets what it asked for."""
    commands, chance = PipelinedCommands(client), Random(18)

    async def echo(text: str) -> bytes | None:
        try:
            reply: bytes = await commands.run(chance.choice((0.002, 20)), ("ECHO", text))
        except (TimeoutError, *FAILURES):
            return None
        return reply

    replies: dict[str, bytes | None | BaseException] = {}
    for turn in range(40):
        callers = {f"{turn}-{number}": None for number in range(20)}
        tasks = {text: asyncio.create_task(echo(text)) for text in callers}
        await asyncio.sleep(chance.choice((0, 0, 0.001)))
        for task in chance.sample([*tasks.values()], 5):
            task.cancel()
        if turn % 8 == 3:
            await client.client_kill_filter(_type="normal", skipme=True)
        if turn % 8 == 6:
            await client.client_pause(5)
        replies |= zip(tasks, await asyncio.gather(*tasks.values(), return_exceptions=True), strict=True)
    answered = {text: reply for text, reply in replies.items() if isinstance(reply, bytes)}
    assert answered == {text: text.encode() for text in answered}
    assert len(answered) > 200


async def test_a_connection_that_is_replaced_closes_with_its_last_reply(
    client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelined_commands, "CLOSE_SECONDS", 3600.0)
    commands = PipelinedCommands(client)
    for number in range(5):
        cancelled = asyncio.create_task(commands.run(20, ("ECHO", f"{number}")))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert await commands.run(20, ("ECHO", "next")) == b"next"
        assert cancelled.cancelled()
    async with asyncio.timeout(60):
        # The last one, and that of this question.
        while len(await client.client_list()) > 2:
            await asyncio.sleep(0.01)
