"""Parsed output in the formats of the OpenAI API: deltas of a stream, and the parts of a non-streaming message."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import msgspec
from pydantic import BaseModel

from loraplex.engine.messages import Finished
from loraplex.grammar.parsing.deltas import (
    ArgumentsDelta,
    ContentDelta,
    EngineReason,
    OutputDelta,
    ToolCallStart,
)
from loraplex.platform.inference.generation import Generation
from loraplex.platform.inference.structured_output.constrained_output import ConstrainedOutput
from loraplex.platform.web.openai.response_envelope import ResponseHead, event_of, frame_of, usage_of
from loraplex.platform.web.openai.response_models import (
    CalledFunction,
    FinishReason,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
    encoded,
)

ChoiceT = TypeVar("ChoiceT", bound=BaseModel)
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


class Chunks(Generic[ChoiceT]):
    """What both encoders share: the frame of a chunk, the parsers of constrained output, and the usage at the end."""

    def __init__(
        self, head: ResponseHead, generation: Generation, include_usage: bool, empty: ChoiceT, members: bytes
    ) -> None:
        """`members`: those of the chunk of the choice `empty` that differ from chunk to chunk."""
        self._head, self._stats, self._output = head, generation.stats, generation.output
        self._include_usage = include_usage
        without = self._chunk([empty], **({"usage": None} if include_usage else {}))
        self._frame = frame_of(without, members, generation.choices)
        self._before, self._running = self._frame.before, self._frame.running
        # One for each choice; none for plain text.
        self._parsers = [each.parser() for each in [generation.output] * generation.choices if each]

    def closing(self) -> bytes:
        return event_of(self._chunk([], usage=usage_of(self._stats))) if self._include_usage else b""

    def _chunk(self, choices: list[ChoiceT], **with_usage: Usage | None) -> BaseModel:
        raise NotImplementedError

    async def _ended(self, choice: int, event: Finished) -> tuple[list[OutputDelta], FinishReason]:
        """Return the remaining deltas of a choice, and why it ended. Raises `SchemaNotSatisfied`."""
        if self._output is None:
            return [], ended_by(event)
        return await self._output.finish(self._parsers[choice], ended_by(event))


async def parse_finished(
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
