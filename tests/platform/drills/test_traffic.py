"""Traffic keeps one outcome per request, whatever became of it, and waits for those in progress."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from loraplex.platform.bench.client import CompletionRequest, StreamRecord
from loraplex.platform.drills.traffic import (
    CLIENT_TIMEOUT,
    CONNECTION_LOST,
    NO_CONNECTION,
    ReportedUsage,
    RequestOutcome,
    Traffic,
    is_streamed,
    outcome_of,
    recovery_s,
)

USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
PIECE = b'data: {"choices": [{"text": "ab"}]}\n\n'
STREAM = PIECE + b"data: %s\n\ndata: [DONE]\n\n" % json.dumps({"choices": [], "usage": USAGE}).encode()
WHOLE = json.dumps({"choices": [{"text": "ab"}], "usage": USAGE}).encode()


def response(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body


@asynccontextmanager
async def server(seen: list[str], *, answers_after: asyncio.Event | None = None) -> AsyncIterator[str]:
    """Answers each request in full and notes its `x-request-id`."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        found = re.search(r"x-request-id: (\S+)", head)
        seen.append(found[1] if found else "")
        length = re.search(r"Content-Length: (\d+)", head)
        body = json.loads(await reader.readexactly(int(length[1]) if length else 0))
        if answers_after is not None:
            await answers_after.wait()
        writer.write(response(STREAM if body["stream"] else WHOLE))
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as found:
        yield "http://{}:{}".format(*found.sockets[0].getsockname())


async def test_every_request_has_one_outcome_of_its_own_id() -> None:
    seen: list[str] = []
    async with (
        asyncio.timeout(60),
        server(seen) as url,
        Traffic([url], "key", "model", rate_per_s=200, max_tokens=2) as traffic,
    ):
        while len(traffic.outcomes) < 5:
            await asyncio.sleep(0.01)
    assert sorted(seen) == sorted(each.request_id or "" for each in traffic.outcomes)
    assert len(set(seen)) == len(seen)
    assert {each.usage for each in traffic.outcomes} == {ReportedUsage(9, 4, 2)}
    assert all(each.complete and each.deliveries for each in traffic.outcomes)
    assert not traffic.errors


async def test_stopping_waits_for_requests_in_progress_and_begins_none() -> None:
    seen: list[str] = []
    answers = asyncio.Event()
    async with (
        asyncio.timeout(60),
        server(seen, answers_after=answers) as url,
        Traffic([url], "key", "model", rate_per_s=200, max_tokens=2) as traffic,
    ):
        while not seen:
            await asyncio.sleep(0.01)
        stopping = asyncio.create_task(traffic.stop())
        await asyncio.sleep(0.05)
        assert not stopping.done() and not traffic.outcomes
        answers.set()
        await stopping
    assert traffic.outcomes and all(each.complete for each in traffic.outcomes)


async def test_requests_go_to_the_servers_in_turn_and_one_that_is_away_is_an_error() -> None:
    seen: list[str] = []
    async with (
        asyncio.timeout(60),
        server(seen) as url,
        Traffic([url, "http://127.0.0.1:1"], "key", "model", 200, max_tokens=2) as traffic,
    ):
        while len(traffic.outcomes) < 4:
            await asyncio.sleep(0.01)
    assert abs(traffic.errors[NO_CONNECTION] - len(seen)) <= 1
    assert {each.status for each in traffic.outcomes} == {0, 200}


async def test_when_to_try_again_is_kept_and_first_tokens_are_of_streams() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 429 X\r\nRetry-After: 7\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with asyncio.timeout(60), await asyncio.start_server(refuse, "127.0.0.1", 0) as found:
        url = "http://{}:{}".format(*found.sockets[0].getsockname())
        async with Traffic([url], "key", "model", 200, max_tokens=2) as traffic:
            while not traffic.outcomes:
                await asyncio.sleep(0.01)
    assert {(each.status, each.retry_after) for each in traffic.outcomes} == {(429, "7")}
    streamed = ended(chunks=STREAM, over=True)
    assert outcome_of(streamed, 0.0, 1.0).first_token_s == 1.0 - streamed.sent_at
    assert outcome_of(ended(stream=False, chunks=WHOLE, over=True), 0.0, 1.0).first_token_s is None


def ended(*, stream: bool = True, status: int = 200, chunks: bytes = b"", over: bool = False) -> StreamRecord:
    request = CompletionRequest("m", "hi", 2, "key", request_id="mine", stream=stream)
    found = StreamRecord(request, status, ended=over, chunks=[(1.0, chunks)])
    if not over:
        found.error = "EOFError: it broke off"
    return found


ERROR = b'{"error": {"message": "no", "code": "engine_restarting"}}'


@pytest.mark.parametrize(
    ("record", "timed_out", "code", "deliveries"),
    [
        (ended(chunks=PIECE), False, CONNECTION_LOST, 1),
        (ended(chunks=PIECE), True, CLIENT_TIMEOUT, 1),
        (
            ended(chunks=PIECE + b"event: error\ndata: " + ERROR + b"\n\n", over=True),
            False,
            "engine_restarting",
            1,
        ),
        (ended(chunks=ERROR, status=503, over=True), False, "engine_restarting", 0),
        (ended(chunks=b"<html>", status=502, over=True), False, "http_502", 0),
        (ended(chunks=WHOLE[:20], stream=False), False, CONNECTION_LOST, 0),
        (ended(status=0), False, NO_CONNECTION, 0),
    ],
)
def test_what_broke_off_is_named(record: StreamRecord, timed_out: bool, code: str, deliveries: int) -> None:
    outcome = outcome_of(record, 0.0, 1.0, timed_out=timed_out)
    assert (outcome.request_id, outcome.code, outcome.deliveries) == ("mine", code, deliveries)
    assert not outcome.complete and outcome.usage is None


def test_a_share_of_the_requests_is_streamed() -> None:
    assert [is_streamed(number, 0.5) for number in range(4)] == [False, True, False, True]
    assert sum(is_streamed(number, 0.3) for number in range(100)) == 30
    assert all(is_streamed(number, 1.0) for number in range(9))
    assert not any(is_streamed(number, 0.0) for number in range(9))


def outcome(started_s: float, ended_s: float, complete: bool = True) -> RequestOutcome:
    code = None if complete else CONNECTION_LOST
    return RequestOutcome("r", started_s, ended_s, 200, code, complete, None, 0)


@pytest.mark.parametrize(
    ("outcomes", "seconds"),
    [
        ([outcome(9, 11)], None),
        ([outcome(9, 11), outcome(10.5, 12)], 2.0),
        ([outcome(10.5, 11), outcome(11, 12, complete=False), outcome(12, 13), outcome(13, 14)], 3.0),
        ([outcome(8, 9, complete=False), outcome(10.5, 11)], 1.0),
        ([outcome(10.5, 11), outcome(11, 12, complete=False)], None),
    ],
    ids=["none since", "no error", "after the last error", "an error before", "not yet"],
)
def test_recovery_is_the_first_success_that_no_error_follows(
    outcomes: list[RequestOutcome], seconds: float | None
) -> None:
    assert recovery_s(outcomes, 10.0) == seconds
