"""Writes a message as events of its blocks, and the whole message as what these events have added up to.

Invariant: a whole message is what a client that accumulates the stream of the same deltas has.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias
from uuid import uuid4

import msgspec
from pydantic_core import from_json, to_json

from loraplex.engine.messages import Delta, Finished, Scored
from loraplex.grammar.parsing.deltas import (
    AnswerReason,
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    ToolCallStart,
)
from loraplex.platform.errors import ClientError
from loraplex.platform.inference.answer_parser import AnswerParser
from loraplex.platform.inference.generation import Generation
from loraplex.platform.inference.thought_seal import ThoughtSeal
from loraplex.platform.observability.request_id import HEADER
from loraplex.platform.observability.request_stats import RequestStats
from loraplex.platform.parameters.messages_request import MessagesRequest
from loraplex.platform.web.anthropic.errors import error_document
from loraplex.platform.web.anthropic.response_models import StopReason
from loraplex.platform.web.inference_plane import DialectContext

BlockType: TypeAlias = Literal["text", "thinking", "tool_use"]
_REASONS: Final[dict[AnswerReason, StopReason]] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageResponse:
    """A `DialectResponse`. `shows_thought`: not only sealed. `has_markers`: the request marks what to cache."""

    id: str
    model: str
    stream: bool
    shows_thought: bool
    has_markers: bool
    request_id: str
    seal: ThoughtSeal

    def chunks(self, generation: Generation) -> "MessageEvents":
        """Return what writes the events of a stream."""
        return MessageEvents(self, generation.stats, AnswerParser(generation))

    async def collect(self, generation: Generation) -> bytes:
        """Wait for the end of the generation, and return the whole message as JSON."""
        events = self.chunks(generation)
        async for choice, event in generation.events():
            if isinstance(event, Delta):
                events.delta(choice, event)
            elif isinstance(event, Finished):
                await events.finished(choice, event)
        return events.message()


def respond(body: MessagesRequest, context: DialectContext) -> MessageResponse:
    """Return the response to a body."""
    return MessageResponse(
        id=f"msg_{uuid4().hex}",
        model=body.model,
        stream=body.stream,
        shows_thought=body.thinking is None or body.thinking.display != "omitted",
        has_markers=body.has_markers,
        request_id=context.response_headers.get(HEADER, ""),
        seal=context.seal,
    )


class MessageEvents:
    """The `ChunkEncoder` of one message, and what has been written of it."""

    ping: Final = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, response: MessageResponse, stats: RequestStats, parser: AnswerParser) -> None:
        self._response, self._stats, self._parser = response, stats, parser
        self._content: list[dict[str, Any]] = []
        self._open: BlockType | None = None
        self._parts: list[str] = []
        self._stop: tuple[StopReason, str | None] | None = None

    def opening(self) -> bytes:
        return event_of("message_start", message=self._document()) + self.ping

    def scored(self, choice: int, event: Scored) -> bytes:
        """A message has no scores."""
        return b""

    def delta(self, choice: int, event: Delta) -> bytes:
        return self.write(self._parser.feed(choice, event))

    async def finished(self, choice: int, event: Finished) -> bytes:
        deltas, reason = await self._parser.finish(choice, event)
        return self.write(deltas) + self.stop(reason, event.stop if isinstance(event.stop, str) else None)

    def closing(self) -> bytes:
        reason, sequence = self._stop or (None, None)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return event_of("message_delta", delta=delta, usage=self._usage()) + event_of("message_stop")

    def failed(self, error: ClientError) -> bytes:
        return event_of("error", **error_document(error, self._response.request_id))

    def write(self, deltas: Iterable[OutputDelta]) -> bytes:
        """Return the events of further deltas."""
        return b"".join(event for delta in deltas for event in self._events(delta))

    def stop(self, reason: AnswerReason, stop_sequence: str | None) -> bytes:
        """Return the events that end the last block. `stop_sequence`: the text that ended the message, if one did."""
        ended_by_text = reason == "stop" and stop_sequence is not None
        self._stop = ("stop_sequence", stop_sequence) if ended_by_text else (_REASONS[reason], None)
        return b"".join(self._close())

    def message(self) -> bytes:
        """Return the whole message as JSON."""
        return msgspec.json.encode(self._document())

    def _events(self, delta: OutputDelta) -> Iterator[bytes]:
        if isinstance(delta, ToolCallStart):
            yield from self._begin("tool_use", id=delta.call_id, name=delta.name, input={})
            return
        if isinstance(delta, ReasoningDelta):
            if self._open != "thinking":
                yield from self._begin("thinking", thinking="", signature="")
            added = {"type": "thinking_delta", "thinking": delta.text}
        elif isinstance(delta, ContentDelta):
            if self._open != "text":
                yield from self._begin("text", text="")
            added = {"type": "text_delta", "text": delta.text}
        else:
            added = {"type": "input_json_delta", "partial_json": delta.text}
        self._parts.append(delta.text)
        if self._response.shows_thought or not isinstance(delta, ReasoningDelta):
            yield self._event("content_block_delta", delta=added)

    def _begin(self, kind: BlockType, **block: Any) -> Iterator[bytes]:
        yield from self._close()
        self._open = kind
        self._content.append({"type": kind, **block})
        yield self._event("content_block_start", content_block=self._content[-1])

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        block, written = self._content[-1], "".join(self._parts)
        if self._open == "text":
            block["text"] = written
        elif self._open == "tool_use":
            block["input"] = _arguments(written)
        else:
            block["thinking"] = written if self._response.shows_thought else ""
            block["signature"] = self._response.seal.seal(self._response.model, written)
            added = {"type": "signature_delta", "signature": block["signature"]}
            yield self._event("content_block_delta", delta=added)
        yield self._event("content_block_stop")
        self._open = None
        self._parts.clear()

    def _event(self, name: str, **fields: Any) -> bytes:
        return event_of(name, index=len(self._content) - 1, **fields)

    def _document(self) -> dict[str, Any]:
        """Build a `MessageDocument`."""
        reason, sequence = self._stop or (None, None)
        return {
            "id": self._response.id,
            "type": "message",
            "role": "assistant",
            "model": self._response.model,
            "content": self._content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        stats = self._stats
        computed = stats.prompt_tokens - stats.cached_tokens
        created = computed if self._response.has_markers else 0
        return {
            "input_tokens": computed - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": stats.cached_tokens,
            "output_tokens": stats.completion_tokens,
            "output_tokens_details": {"thinking_tokens": stats.reasoning_tokens},
        }


def _arguments(written: str) -> msgspec.Raw:
    """Return the arguments as they were written; of a call that `max_tokens` cut off, the members that are complete."""
    try:
        return msgspec.json.decode(written, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        # As the client's own accumulation has it.
        return msgspec.Raw(to_json(from_json(written, allow_partial=True), inf_nan_mode="null"))
    except ValueError:
        return msgspec.Raw(b"{}")


def event_of(name: str, **fields: Any) -> bytes:
    """Encode one whole SSE event; its data has the event's name as `type`."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name} | fields))
