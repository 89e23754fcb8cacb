"""Parsed output in the formats of the OpenAI API: deltas of a stream, and the parts of a non-streaming message."""

from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec
from pydantic import BaseModel

from loraplex.engine.messages import Finished
from loraplex.grammar.parsing.deltas import (
    ArgumentsDelta,
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    ToolCallStart,
    join_deltas,
)
from loraplex.platform.errors import ClientError
from loraplex.platform.inference.answer_parser import AnswerParser
from loraplex.platform.inference.generation import Generation
from loraplex.platform.web.openai.response_envelope import (
    DONE,
    ResponseHead,
    error_event,
    event_of,
    frame_of,
    usage_of,
)
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


def delta_json(delta: OutputDelta) -> bytes:
    """Encode the members of one `delta` object. The id, type and name of a call are sent once, its arguments bit by bit."""
    if isinstance(delta, ContentDelta):
        return b'"content":' + _encode(delta.text)
    if isinstance(delta, ReasoningDelta):
        text = _encode(delta.text)
        return b'"reasoning":' + text + b',"reasoning_content":' + text
    if isinstance(delta, ArgumentsDelta):
        # Encoded without the model, like the text of a message: there may be one for each token.
        function = b'"function":{"arguments":' + _encode(delta.text)
        return b'"tool_calls":[{"index":%d,' % delta.index + function + b"}}]"
    start = FunctionDelta(name=delta.name, arguments="")
    call = ToolCallDelta(index=delta.index, id=delta.call_id, type="function", function=start)
    return b'"tool_calls":[' + encoded(call) + b"]"


class Chunks(Generic[ChoiceT]):
    """What both encoders share: the frame of a chunk, the parsers of constrained output, and the usage at the end."""

    ping = b""

    def __init__(
        self, head: ResponseHead, generation: Generation, include_usage: bool, empty: ChoiceT, members: bytes
    ) -> None:
        """`members`: those of the chunk of the choice `empty` that differ from chunk to chunk."""
        self._head, self._stats = head, generation.stats
        self._include_usage = include_usage
        without = self._chunk([empty], **({"usage": None} if include_usage else {}))
        self._frame = frame_of(without, members, generation.choices)
        self._before, self._running = self._frame.before, self._frame.running
        self._parser = AnswerParser(generation)

    def closing(self) -> bytes:
        usage = event_of(self._chunk([], usage=usage_of(self._stats))) if self._include_usage else b""
        return usage + DONE

    def failed(self, error: ClientError) -> bytes:
        return error_event(error)

    def _chunk(self, choices: list[ChoiceT], **with_usage: Usage | None) -> BaseModel:
        raise NotImplementedError

    async def _ended(self, choice: int, event: Finished) -> tuple[list[OutputDelta], FinishReason]:
        """Return the remaining deltas of a choice, and why it ended. Raises `SchemaNotSatisfied`."""
        return await self._parser.finish(choice, event)


def gathered(deltas: Iterable[OutputDelta]) -> tuple[str, str, list[ToolCall]]:
    """Join the deltas of a choice: thought, content and calls."""
    thought, content, calls = join_deltas(deltas)
    return thought, content, [_call(*each) for each in calls]


def _call(start: ToolCallStart, arguments: str) -> ToolCall:
    function = CalledFunction(name=start.name, arguments=arguments)
    return ToolCall(id=start.call_id, type="function", function=function)
