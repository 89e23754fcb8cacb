"""A streaming client of the completion endpoints, on asyncio streams and the parser of httptools.

Invariant: while a stream runs the client stores its chunks and their times only, because it shares the cores with the server.
It decodes them after the end.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec
from httptools import HttpParserError, HttpResponseParser

from loraplex.platform.bench.report import BenchFailed

READ_BYTES = 1 << 16
_FIELD = b"data: "


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One request. The client disconnects after `cancel_after` chunks; None: never. `prompt` is text or token ids.

    With `chat` the prompt is a text and becomes the message of a user. `request_id` is sent as `x-request-id`.
    """

    model: str
    prompt: str | Sequence[int]
    output_len: int
    api_key: str
    cancel_after: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = False
    request_id: str | None = None
    stream: bool = True

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self) -> bytes:
        """The JSON body: greedy and of exactly `output_len` tokens, unless `options` change that."""
        prompt = (
            {"messages": [{"role": "user", "content": self.prompt}]} if self.chat else {"prompt": self.prompt}
        )
        fields: dict[str, Any] = {
            "model": self.model,
            **prompt,
            "max_tokens": self.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": self.stream,
        }
        if self.stream:
            fields["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(fields | dict(self.options))


@dataclass(slots=True)
class StreamRecord:
    """The received chunks with their times in seconds of `time.perf_counter`. `ended`: the response is over.

    `status` is that of HTTP, 0 before the response began.
    """

    request: CompletionRequest
    status: int = 0
    retry_after: str | None = None
    sent_at: float = 0.0
    ended_at: float = 0.0
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    error: str | None = None
    cancelled: bool = False
    ended: bool = False

    def on_body(self, chunk: bytes) -> None:
        """Keep a chunk of the body; called by the parser."""
        if not self.cancelled:
            self.chunks.append((time.perf_counter(), chunk))
            self.cancelled = len(self.chunks) == self.request.cancel_after

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep when to try again; called by the parser."""
        if name.lower() == b"retry-after":
            self.retry_after = value.decode(errors="replace")

    def on_message_complete(self) -> None:
        """Note the end of the body; called by the parser."""
        self.ended = True


async def stream_completion(
    base_url: str, request: CompletionRequest, into: StreamRecord | None = None
) -> StreamRecord:
    """Send one request and record its stream, in `into` if the caller reads the record while it grows.

    Failures of transport or server are in `error`, never raised.
    """
    record = into or StreamRecord(request)
    record.sent_at = time.perf_counter()
    try:
        await _exchange(base_url, request, record)
    except (OSError, EOFError, HttpParserError) as error:
        record.error = f"{type(error).__name__}: {error}"
    record.ended_at = time.perf_counter()
    return record


async def _exchange(base_url: str, request: CompletionRequest, record: StreamRecord) -> None:
    url = urlsplit(base_url)
    secure = url.scheme == "https"
    reader, writer = await asyncio.open_connection(
        url.hostname, url.port or (443 if secure else 80), ssl=secure or None
    )
    parser = HttpResponseParser(record)
    try:
        writer.write(_head(url.netloc, url.path.rstrip("/") + request.path, request))
        while not (record.ended or record.cancelled):
            data = await reader.read(READ_BYTES)
            if not data:
                raise EOFError("the server closed the connection within its response")
            parser.feed_data(data)
            record.status = parser.get_status_code()
    finally:
        writer.close()
    if record.status != 200:
        text = b"".join(chunk for _, chunk in record.chunks)
        record.error = f"HTTP {record.status}: {text[:500].decode(errors='replace')}"


def _head(host: str, path: str, request: CompletionRequest) -> bytes:
    body = request.body()
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {host}",
        f"Authorization: Bearer {request.api_key}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    if request.request_id is not None:
        lines.append(f"x-request-id: {request.request_id}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass(frozen=True, slots=True)
class Completion:
    """A decoded stream. `token_times` are the times at which text arrived, in seconds since sending.

    `tokens` holds the token strings if the request asked for log-probabilities, `tops` the alternatives of each. `error_code`
    is the code of the error object that the server sent.
    """

    text: str
    token_times: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    complete: bool
    error: str | None
    latency: float
    tokens: tuple[str, ...] = ()
    tops: tuple[Mapping[str, float], ...] = ()
    finish_reason: str | None = None
    error_code: str | None = None
    reasoning_tokens: int = 0

    @property
    def time_to_first_token(self) -> float:
        """Seconds. Raises `BenchFailed` if no token arrived."""
        if not self.token_times:
            raise BenchFailed(f"a request was answered without any token: {self.error or 'no text'}")
        return self.token_times[0]


def decode(record: StreamRecord) -> Completion:
    """Decode the events of a stream, or the document of a response that is none, into one completion."""
    texts: list[str] = []
    times: list[float] = []
    tokens: list[str] = []
    tops: list[Mapping[str, float]] = []
    usage: Mapping[str, Any] = {}
    error, done, reason, code = record.error, False, None, None
    for at, event in _documents(record):
        if event == b"[DONE]":
            done = True
            continue
        document = msgspec.json.decode(event)
        if "error" in document:
            error, code = error or str(document["error"].get("message")), document["error"].get("code")
        usage = document.get("usage") or usage
        for choice in document.get("choices", ()):
            reason = choice.get("finish_reason") or reason
            if text := _text_of(choice):
                texts.append(text)
                times.append(at - record.sent_at)
            if not record.request.chat and (logprobs := choice.get("logprobs")):
                tokens.extend(logprobs["tokens"])
                tops.extend(logprobs["top_logprobs"] or ())
    return Completion(
        text="".join(texts),
        token_times=tuple(times),
        prompt_tokens=usage.get("prompt_tokens", 0),
        output_tokens=usage.get("completion_tokens", 0),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        complete=done and error is None,
        error=error if done or error or record.cancelled else "the stream broke off",
        latency=record.ended_at - record.sent_at,
        tokens=tuple(tokens),
        tops=tuple(tops),
        finish_reason=reason,
        error_code=code,
        reasoning_tokens=(usage.get("completion_tokens_details") or {}).get("reasoning_tokens", 0),
    )


def _text_of(choice: Mapping[str, Any]) -> str:
    """The text of a completion, or the content and tool-call text of a chat delta."""
    if "text" in choice:
        return str(choice["text"])
    delta = choice.get("delta") or choice.get("message") or {}
    functions = [call["function"] for call in delta.get("tool_calls") or ()]
    calls = [text for each in functions for text in (each.get("name"), each.get("arguments"))]
    return "".join(filter(None, [delta.get("content"), *calls]))


def _documents(record: StreamRecord) -> list[tuple[float, bytes]]:
    """The JSON documents of a response with the times of their ends; `[DONE]` ends those of a complete one.

    The body of a refusal may be no JSON: a proxy's is a page.
    """
    if record.request.stream and record.status in (0, 200):
        return _events(record.chunks)
    body = b"".join(chunk for _, chunk in record.chunks)
    if not record.ended or not body.startswith(b"{"):
        return []
    return [(record.ended_at, body), (record.ended_at, b"[DONE]")]


def _events(chunks: Sequence[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """The data of each event with the time its end arrived; an event may span chunks."""
    events: list[tuple[float, bytes]] = []
    rest = b""
    for at, chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n\n")
        for event in whole:
            data = [line.removeprefix(_FIELD) for line in event.split(b"\n") if line.startswith(_FIELD)]
            events.extend((at, each) for each in data)
    return events
