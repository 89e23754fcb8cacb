"""A server that speaks chat, Responses and Messages to one client, answers by `scripted_answers`, and keeps each request.

It answers as servers do whose users move to this one: with `reasoning_content`, `refusal` and `annotations`, which clients then
send back in their histories.
"""

import json
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.outside.clients.scripted_answers import (
    MESSAGES,
    RESPONSES,
    SENTENCE,
    THOUGHT,
    Answer,
    answer_to,
)
from tests.outside.clients.scripted_messages import message_events, message_of
from tests.outside.clients.scripted_responses import response_events, response_of

MODEL = "demo/base"
USAGE = {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25}
# What differs from run to run, or is a secret.
OMITTED_HEADERS = frozenset(
    ("authorization", "host", "connection", "content-length", "x-request-id", "x-api-key")
    + tuple(
        f"x-stainless-{name}"
        for name in ("arch", "lang", "os", "package-version", "runtime", "runtime-version")
    )
)


class Recording(ThreadingHTTPServer):
    """`requests` has what came, in its order: method, path, headers and body. `answers` come before those of `answer_to`."""

    daemon_threads = True

    def __init__(self, answers: Sequence[Answer]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.answers = list(answers)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def recording(answers: Sequence[Answer] = ()) -> Iterator[Recording]:
    """A server on a free port, closed at the end."""
    server = Recording(answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Recording

    def do_HEAD(self) -> None:
        self._keep(None)
        self._send(b"", "text/plain")

    def do_GET(self) -> None:
        self._keep(None)
        model = {"id": MODEL, "object": "model", "created": 1, "owned_by": "demo", "max_model_len": 2048}
        if "anthropic-version" in self.headers:
            shown = {"display_name": MODEL, "created_at": "2026-01-01T00:00:00Z", "lifecycle": "active"}
            model = {"id": MODEL, "type": "model", **shown}
        if not self.path.startswith("/v1/"):
            self._send(b"", "text/plain")
        elif self.path.rstrip("/") == "/v1/models":
            self._reply({"object": "list", "data": [model]})
        else:
            self._reply(model)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.headers.get("content-encoding") in ("gzip", "deflate"):
            content = zlib.decompress(content, wbits=47)
        body = json.loads(content)
        self._keep(body)
        path, turn = self.path.partition("?")[0].rstrip("/"), len(self.server.requests)
        streams = body.get("stream")
        if path.endswith(("/input_tokens", "/count_tokens")):
            kind = {} if path.endswith("/count_tokens") else {"object": "response.input_tokens"}
            self._reply({**kind, "input_tokens": 20})
        elif path.endswith("/decisions"):
            self._reply(_decision(body))
        elif path.endswith("/chat/completions"):
            answer = self._answer(body)
            self._stream(_chunks(body, answer)) if streams else self._reply(_chat(answer))
        elif path == RESPONSES:
            answer = self._answer(body)
            self._named(response_events(body, answer, turn)) if streams else self._reply(
                response_of(body, answer, turn)
            )
        elif path == MESSAGES and "thread" in body:
            # The client then sends the whole history.
            details = {"error_code": "thread_unsupported_request"}
            error = {"type": "invalid_request_error", "message": "thread: not served", "details": details}
            self._reply({"type": "error", "error": error, "request_id": "req_1"}, 400)
        elif path == MESSAGES:
            answer = self._answer(body)
            self._named(message_events(body, answer, turn)) if streams else self._reply(
                message_of(body, answer, turn)
            )
        elif path.endswith("/completions"):
            choice = {"index": 0, "text": SENTENCE, "finish_reason": "stop", "logprobs": None}
            shown = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL}
            whole = {**shown, "choices": [choice], "usage": USAGE}
            self._stream(iter([whole])) if streams else self._reply(whole)
        else:
            self.send_error(404)

    def _answer(self, body: dict[str, Any]) -> Answer:
        return self.server.answers.pop(0) if self.server.answers else answer_to(self.path, body)

    def _keep(self, body: Any) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        kept = {name: headers[name] for name in sorted(headers.keys() - OMITTED_HEADERS)}
        self.server.requests.append(
            {"method": self.command, "path": self.path, "headers": kept, "body": body}
        )

    def _reply(self, value: Any, status: int = 200) -> None:
        self._send(json.dumps(value).encode(), "application/json", status)

    def _send(self, content: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else content)

    def _stream(self, chunks: Iterator[Any]) -> None:
        self._events(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        self.wfile.write(b"data: [DONE]\n\n")

    def _named(self, events: Iterator[dict[str, Any]]) -> None:
        """Each event with its type before it, as Responses and Messages have them."""
        self._events(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)

    def _events(self, lines: Iterator[str]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for line in lines:
            self.wfile.write(line.encode())
            self.wfile.flush()
        self.close_connection = True

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing."""


def _tool_calls(answer: Answer) -> list[dict[str, Any]]:
    function = {"name": answer.name, "arguments": answer.text}
    return [{"index": 0, "id": "call_1", "type": "function", "function": function}]


def _chat(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None, "annotations": []}
    message["reasoning_content"] = THOUGHT
    if answer.name is None:
        message["content"] = answer.text
    else:
        message["tool_calls"] = _tool_calls(answer)
    reason = "stop" if answer.name is None else "tool_calls"
    choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": _logprobs(answer)}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [choice],
        "usage": USAGE,
    }


def _decision(body: dict[str, Any]) -> dict[str, Any]:
    """The first of all options, for certain."""
    answers: list[dict[str, Any]] = []
    for each in body["questions"]:
        answer: dict[str, Any] = {"type": each["type"], "name": each.get("name")}
        if each["type"] == "predicate":
            answers.append(answer | {"probability": 1.0})
            continue
        options = each.get("choices") or [
            {"value": value, "label": level["label"]} for value, level in enumerate(each["levels"])
        ]
        shown = [
            {name: option[name] for name in ("value", "label") if name in option}
            | {"probability": float(not number)}
            for number, option in enumerate(options)
        ]
        top = {"choice": shown[0]["value"]} if each["type"] == "choice" else {"score": 0.0}
        answers.append(answer | top | {"confidence": 1.0, "probabilities": shown})
    usage: dict[str, Any] = {"input_tokens": 20, "output_tokens": 0, "total_tokens": 20}
    usage |= {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}
    usage |= {"output_tokens_details": {"reasoning_tokens": 0}}
    return {"answers": answers, "model": MODEL, "usage": usage}


def _logprobs(answer: Answer) -> Any:
    one = {"token": answer.text, "logprob": -0.5, "bytes": None, "top_logprobs": []}
    return {"content": [one], "refusal": None}


def _chunks(body: dict[str, Any], answer: Answer) -> Iterator[dict[str, Any]]:
    shown = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}

    def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {**shown, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}

    yield chunk({"role": "assistant", "content": ""})
    yield chunk({"reasoning_content": THOUGHT})
    if answer.name is None:
        yield chunk({"content": answer.text})
        yield chunk({}, "stop")
    else:
        yield chunk({"tool_calls": _tool_calls(answer)})
        yield chunk({}, "tool_calls")
    if (body.get("stream_options") or {}).get("include_usage"):
        yield {**shown, "choices": [], "usage": USAGE}
