"""The response of `/v1/responses`, streamed and whole: the whole one is the response object of the last event."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from uuid import uuid4

import msgspec

from loraplex.engine.messages import Delta, Finished, Scored
from loraplex.platform.errors import ClientError
from loraplex.platform.inference.answer_parser import AnswerParser
from loraplex.platform.inference.generation import Generation
from loraplex.platform.inference.prompting.token_text import TokenText
from loraplex.platform.parameters.responses_request import INCLUDE_SEAL, ResponsesRequest
from loraplex.platform.parameters.responses_tools import ToolName
from loraplex.platform.web.inference_plane import DialectContext
from loraplex.platform.web.openai.logprobs import chat_entries
from loraplex.platform.web.openai.responses.envelope import Envelope, repeated
from loraplex.platform.web.openai.responses.items import Event, OutputItems, Seal


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesResponse:
    """A `DialectResponse`. `seal`: what seals the thought, if it is asked for. `names`: what the client calls the tools."""

    envelope: Envelope
    stream: bool
    names: Mapping[str, ToolName]
    seal: Seal | None
    text: TokenText

    @property
    def id(self) -> str:
        """The id of the response."""
        return self.envelope.id

    def chunks(self, generation: Generation) -> "ResponseEvents":
        """Return what writes the events of a stream."""
        return ResponseEvents(self, generation)

    async def collect(self, generation: Generation) -> bytes:
        """Wait for the end of the generation, and return the response object as JSON."""
        events = ResponseEvents(self, generation)
        async for choice, event in generation.events():
            if isinstance(event, Delta):
                events.take(choice, event)
            elif isinstance(event, Finished):
                await events.end(choice, event)
        return msgspec.json.encode(events.document())


def respond(body: ResponsesRequest, context: DialectContext) -> ResponsesResponse:
    """Return the response to a body."""
    return ResponsesResponse(
        envelope=Envelope(f"resp_{uuid4().hex}", int(time.time()), repeated(body)),
        stream=body.stream,
        names=body.tools.names,
        seal=partial(context.seal.seal, body.model) if INCLUDE_SEAL in body.include else None,
        text=context.text,
    )


class ResponseEvents:
    """Encodes one stream."""

    ping = b""

    def __init__(self, response: ResponsesResponse, generation: Generation) -> None:
        self._response, self._generation = response, generation
        self._parser = AnswerParser(generation)
        self._items = OutputItems(response.id, response.names, response.seal)
        self._status = "in_progress"
        self._sent = 0

    def take(self, choice: int, event: Delta) -> list[Event]:
        """Add an event of the engine; return those that it causes."""
        logprobs = None if event.logprobs is None else chat_entries(event.logprobs, self._response.text)
        return self._items.add(self._parser.feed(choice, event), logprobs)

    async def end(self, choice: int, event: Finished) -> list[Event]:
        """End the output; return the events that are left of it. Raises `SchemaNotSatisfied`."""
        deltas, reason = await self._parser.finish(choice, event)
        events = self._items.add(deltas)
        status: Final = "incomplete" if reason == "length" else "completed"
        self._status = status
        return events + self._items.finish(status, stopped=reason == "stop")

    def document(self, error: ClientError | None = None) -> dict[str, Any]:
        """Return the response object as it is now."""
        completed_at = int(time.time()) if self._status == "completed" else None
        return self._response.envelope.document(
            self._status,
            self._generation,
            self._items.documents,
            completed_at=completed_at,
            error=error,
        )

    def opening(self) -> bytes:
        document = self.document()
        kinds = ("response.created", "response.in_progress")
        return self._encoded({"type": kind, "response": document} for kind in kinds)

    def scored(self, choice: int, event: Scored) -> bytes:
        """A response has no scores of the prompt."""
        return b""

    def delta(self, choice: int, event: Delta) -> bytes:
        return self._encoded(self.take(choice, event))

    async def finished(self, choice: int, event: Finished) -> bytes:
        return self._encoded(await self.end(choice, event))

    def closing(self) -> bytes:
        return self._encoded([{"type": f"response.{self._status}", "response": self.document()}])

    def failed(self, error: ClientError) -> bytes:
        """End with `error`, which the clients of OpenAI raise, and with `response.failed`, which others wait for."""
        self._status = "failed"
        failure = error.body()["error"]
        raised = {"type": "error", **{name: failure[name] for name in ("code", "message", "param")}}
        last = {"type": "response.failed", "response": self.document(error)}
        return self._encoded([{**raised, "error": failure}, last])

    def _encoded(self, events: Iterable[Event]) -> bytes:
        parts: list[bytes] = []
        for event in events:
            kind: str = event["type"]
            data = msgspec.json.encode({"type": kind, "sequence_number": self._sent, **event})
            parts += (b"event: ", kind.encode(), b"\ndata: ", data, b"\n\n")
            self._sent += 1
        return b"".join(parts)
