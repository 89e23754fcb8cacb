"""A recorded stream decodes to the same completion however its bytes were cut into chunks or reads."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.platform.bench.client import CompletionRequest, StreamRecord, decode, stream_completion
from loraplex.platform.bench.report import BenchFailed

REQUEST = CompletionRequest("m", [1, 2], 3, "secret-key")
USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(piece: str, **fields: Any) -> bytes:
    return event(choices=[{"index": 0, "text": piece, "finish_reason": None, **fields}])


STREAM = text("a") + text("bé") + text("c") + text("") + event(choices=[], usage=USAGE) + b"data: [DONE]\n\n"


def record(*chunks: tuple[float, bytes]) -> StreamRecord:
    return StreamRecord(REQUEST, ended_at=chunks[-1][0] if chunks else 0.0, chunks=list(chunks))


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))


@asynccontextmanager
async def responding(*reads: bytes) -> AsyncIterator[str]:
    """A server that answers every request with these bytes, one write after another, and closes the connection."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for data in reads:
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        yield "http://{}:{}".format(*server.sockets[0].getsockname())


async def test_a_stream_is_recorded_however_it_arrives() -> None:
    whole = HEAD + chunked(STREAM[:50], STREAM[50:])
    async with responding(whole[:20], whole[20:90], whole[90:]) as url:
        completion = decode(await stream_completion(url, REQUEST))
    assert completion.complete and completion.text == "abéc"


async def test_the_client_leaves_after_the_chunks_it_was_asked_for() -> None:
    async with responding(HEAD + chunked(*[text("a")] * 5)) as url:
        record = await stream_completion(url, CompletionRequest("m", "hi", 5, "secret-key", cancel_after=2))
    assert record.cancelled and len(record.chunks) == 2 and record.error is None


@pytest.mark.parametrize(
    ("reads", "error"),
    [
        ([b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 4\r\n\r\nslow"], "HTTP 429: slow"),
        ([HEAD, chunked(text("a"))[:-5]], "EOFError"),
        ([], "EOFError"),
        ([b"SSH-2.0-OpenSSH\r\n"], "HttpParserError"),
        ([HEAD + b"zz\r\n"], "HttpParser"),
    ],
)
async def test_what_is_no_whole_response_is_an_error(reads: list[bytes], error: str) -> None:
    async with responding(*reads) as url:
        record = await stream_completion(url, REQUEST)
    assert record.error is not None and record.error.startswith(error)


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_cut_into_chunks_gives_the_same_answer(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    chunks = [(1.0, STREAM[a:b]) for a, b in pairwise(edges)]
    completion = decode(record(*chunks))
    assert (completion.text, completion.output_tokens, completion.cached_tokens) == ("abéc", 3, 1)
    assert completion.complete and completion.error is None


def test_a_broken_stream_is_an_error_and_an_abandoned_one_is_not() -> None:
    broken = record((1.0, STREAM[:60]))
    assert decode(broken).error == "the stream broke off"
    broken.cancelled = True
    assert decode(broken).error is None
    assert not decode(broken).complete


def test_an_error_event_is_reported() -> None:
    failed = record((1.0, b"event: error\n" + event(error={"message": "too busy", "code": "overloaded"})))
    assert (decode(failed).error, decode(failed).error_code) == ("too busy", "overloaded")


async def test_a_refusal_has_its_status_and_code() -> None:
    body = b'{"error": {"message": "slow down", "code": "rate_limited"}}'
    async with responding(b"HTTP/1.1 429 Slow\r\ncontent-length: %d\r\n\r\n" % len(body) + body) as url:
        refused = await stream_completion(url, REQUEST)
    completion = decode(refused)
    assert (refused.status, completion.error_code, completion.complete) == (429, "rate_limited", False)
    assert completion.error is not None and completion.error.startswith("HTTP 429")


@pytest.mark.parametrize("chat", [False, True])
async def test_a_response_that_is_no_stream_is_one_document(chat: bool) -> None:
    request = CompletionRequest("m", "hi", 3, "secret-key", chat=chat, request_id="mine", stream=False)
    assert "stream_options" not in json.loads(request.body())
    choice = {"message": {"content": "abc"}} if chat else {"text": "abc"}
    body = json.dumps({"choices": [{**choice, "finish_reason": "length"}], "usage": USAGE}).encode()
    async with responding(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body) as url:
        completion = decode(await stream_completion(url, request))
    assert (completion.text, completion.output_tokens, completion.complete) == ("abc", 3, True)


def test_no_token_gives_no_time() -> None:
    with pytest.raises(BenchFailed):
        _ = decode(record()).time_to_first_token


def test_a_chat_is_asked_by_messages_and_its_deltas_are_read() -> None:
    request = CompletionRequest("m", "hi", 3, "secret-key", options={"ignore_eos": False}, chat=True)
    body = json.loads(request.body())
    assert request.path == "/v1/chat/completions" and "prompt" not in body and body["ignore_eos"] is False
    assert body["messages"] == [{"role": "user", "content": "hi"}]

    def delta(reason: str | None = None, **fields: Any) -> bytes:
        return event(choices=[{"index": 0, "delta": fields, "finish_reason": reason}])

    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"a": 1}'}}
    stream = delta(role="assistant", content="") + delta(tool_calls=[call]) + delta(tool_calls=[more])
    stream += delta("tool_calls") + event(choices=[], usage=USAGE) + b"data: [DONE]\n\n"
    completion = decode(StreamRecord(request, ended_at=1.0, chunks=[(1.0, stream)]))
    assert (completion.text, completion.finish_reason, completion.output_tokens) == (
        'f{"a": 1}',
        "tool_calls",
        3,
    )
    assert len(completion.token_times) == 2 and completion.complete
