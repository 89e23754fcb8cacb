"""What a reader made of an answer's text, in the shapes of the OpenAI API: deltas of a stream, and the parts of a message."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from loraplex.engine.messages import Finished
from loraplex.grammar.parsing.deltas import ContentDelta, EngineReason, OutputDelta, ToolCallStart
from loraplex.platform.inference.structured_output.constrained_output import ConstrainedOutput

_encode = msgspec.json.encode

READ_AT_ONCE = 16_384


def piece_delta(piece: OutputDelta) -> bytes:
    """The inside of one `delta` object: a call's id, type and name come once, its arguments in pieces."""
    if isinstance(piece, ContentDelta):
        return b'"content":' + _encode(piece.text)
    if isinstance(piece, ToolCallStart):
        function = {"name": piece.name, "arguments": ""}
        call = {"index": piece.index, "id": piece.call_id, "type": "function", "function": function}
    else:
        call = {"index": piece.index, "function": {"arguments": piece.text}}
    return b'"tool_calls":' + _encode([call])


async def read_whole(
    answer: ConstrainedOutput | None, texts: Sequence[str], finished: Finished | None
) -> tuple[str, list[dict[str, Any]], str]:
    """(content, calls, finish_reason) of a choice that has finished. Raises `SchemaNotSatisfied`.

    A long text is read in parts, between which the event loop serves others.
    """
    text, engine_reason = "".join(texts), ended_by(finished)
    if answer is None:
        return text, [], engine_reason
    reader = answer.reader()
    pieces: list[OutputDelta] = []
    for start in range(0, len(text), READ_AT_ONCE):
        pieces += reader.feed(text[start : start + READ_AT_ONCE])
        await asyncio.sleep(0)
    last, reason = await answer.finish(reader, engine_reason)
    return *_gathered([*pieces, *last]), reason


def ended_by(finished: Finished | None) -> EngineReason:
    """Why the engine ended a choice; a generation that yields no end has raised before."""
    return "stop" if finished is not None and finished.reason == "stop" else "length"


def _gathered(pieces: Iterable[OutputDelta]) -> tuple[str, list[dict[str, Any]]]:
    content: list[str] = []
    calls: list[tuple[ToolCallStart, list[str]]] = []
    for piece in pieces:
        if isinstance(piece, ContentDelta):
            content.append(piece.text)
        elif isinstance(piece, ToolCallStart):
            calls.append((piece, []))
        else:
            calls[piece.index][1].append(piece.text)
    return "".join(content), [_call(start, "".join(arguments)) for start, arguments in calls]


def _call(start: ToolCallStart, arguments: str) -> dict[str, Any]:
    function = {"name": start.name, "arguments": arguments}
    return {"id": start.call_id, "type": "function", "function": function}
