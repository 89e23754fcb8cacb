"""Parsed output in the formats of the OpenAI API: deltas of a stream, and the parts of a whole message."""

import asyncio
from collections.abc import Iterable, Sequence

import msgspec

from loraplex.engine.messages import Finished
from loraplex.grammar.parsing.deltas import (
    ArgumentsDelta,
    ContentDelta,
    EngineReason,
    OutputDelta,
    ToolCallStart,
)
from loraplex.platform.inference.structured_output.constrained_output import ConstrainedOutput
from loraplex.platform.web.openai.response_models import (
    CalledFunction,
    FinishReason,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
    encoded,
)

_encode = msgspec.json.encode

PARSE_CHARACTERS = 16_384


def delta_json(delta: OutputDelta) -> bytes:
    """Encode the members of one `delta` object. The id, type and name of a call are sent once, its arguments bit by bit."""
    if isinstance(delta, ContentDelta):
        return b'"content":' + _encode(delta.text)
    if isinstance(delta, ArgumentsDelta):
        # Encoded without the model, like the text of a message: there may be one for each token.
        function = b'"function":{"arguments":' + _encode(delta.text)
        return b'"tool_calls":[{"index":%d,' % delta.index + function + b"}}]"
    start = FunctionDelta(name=delta.name, arguments="")
    call = ToolCallDelta(index=delta.index, id=delta.call_id, type="function", function=start)
    return b'"tool_calls":[' + encoded(call) + b"]"


async def parse_whole(
    output: ConstrainedOutput | None, texts: Sequence[str], finished: Finished | None
) -> tuple[str, list[ToolCall], FinishReason]:
    """Return (content, calls, finish_reason) of a choice that has finished. Raises `SchemaNotSatisfied`.

    A long text is parsed in parts of `PARSE_CHARACTERS`; between two parts the event loop serves other requests.
    """
    text, engine_reason = "".join(texts), ended_by(finished)
    if output is None:
        return text, [], engine_reason
    parser = output.parser()
    deltas: list[OutputDelta] = []
    for start in range(0, len(text), PARSE_CHARACTERS):
        deltas += parser.feed(text[start : start + PARSE_CHARACTERS])
        await asyncio.sleep(0)
    last, reason = await output.finish(parser, engine_reason)
    return *_gathered([*deltas, *last]), reason


def ended_by(finished: Finished | None) -> EngineReason:
    """Return why the engine ended a choice. A generation that lacks the end of a choice has raised before."""
    return "stop" if finished is not None and finished.reason == "stop" else "length"


def _gathered(deltas: Iterable[OutputDelta]) -> tuple[str, list[ToolCall]]:
    content: list[str] = []
    calls: list[tuple[ToolCallStart, list[str]]] = []
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            content.append(delta.text)
        elif isinstance(delta, ToolCallStart):
            calls.append((delta, []))
        else:
            calls[delta.index][1].append(delta.text)
    return "".join(content), [_call(start, "".join(arguments)) for start, arguments in calls]


def _call(start: ToolCallStart, arguments: str) -> ToolCall:
    function = CalledFunction(name=start.name, arguments=arguments)
    return ToolCall(id=start.call_id, type="function", function=function)
