"""Responses of `/v1/chat/completions`: the whole object, and the chunks of a stream with pre-encoded envelopes.

Invariant: constrained output is parsed by one parser per choice, whether it is streamed or not.
"""

from dataclasses import dataclass, field

import msgspec

from loraplex.engine.messages import Delta, Finished
from loraplex.grammar.parsing.deltas import OutputDelta
from loraplex.platform.api.openai.logprobs import chat_entries
from loraplex.platform.api.openai.parsed_output import delta_json, ended_by, parse_whole
from loraplex.platform.api.openai.response_envelope import ResponseHead, event_of, usage_of
from loraplex.platform.inference.generation import Generation
from loraplex.platform.inference.prompting.token_text import TokenText
from loraplex.platform.inference.structured_output.constrained_output import ConstrainedOutput

_encode = msgspec.json.encode


class ChatChunks:
    """Encodes one stream: role first, then text, the `finish_reason` of each choice, and usage when requested."""

    _role = b'"role":"assistant","content":""'

    def __init__(
        self, head: ResponseHead, generation: Generation, text_of: TokenText, include_usage: bool
    ) -> None:
        self._head = head
        self._choices = generation.choices
        self._stats = generation.stats
        self._text_of = text_of
        self._include_usage = include_usage
        open_end = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        start = head.prefix("chat.completion.chunk") + b'"choices":[{"index":'
        self._before = [start + b'%d,"delta":{' % choice for choice in range(self._choices)]
        self._running = b'},"logprobs":null,"finish_reason":null}]' + open_end
        self._open_end = open_end

    def opening(self) -> bytes:
        return b"".join(before + self._role + self._running for before in self._before)

    def delta(self, choice: int, event: Delta) -> bytes:
        if event.logprobs is None:
            if not event.text:
                return b""
            return self._before[choice] + b'"content":' + _encode(event.text) + self._running
        logprobs = _encode({"content": chat_entries(event.logprobs, self._text_of), "refusal": None})
        text = b'"content":' + _encode(event.text) + b'},"logprobs":'
        return self._before[choice] + text + logprobs + b',"finish_reason":null}]' + self._open_end

    async def finished(self, choice: int, event: Finished) -> bytes:
        reason = b'},"logprobs":null,"finish_reason":' + _encode(event.reason) + b"}]"
        return self._before[choice] + reason + self._open_end

    def closing(self) -> bytes:
        if not self._include_usage:
            return b""
        return event_of(
            self._head.fields("chat.completion.chunk") | {"choices": [], "usage": usage_of(self._stats)}
        )


class ParsedChatChunks(ChatChunks):
    """Encodes the stream of constrained output: the deltas that the parser of each choice makes of its text."""

    # A response of tool calls alone has no content.
    _role = b'"role":"assistant","content":null'

    def __init__(
        self,
        output: ConstrainedOutput,
        head: ResponseHead,
        generation: Generation,
        text_of: TokenText,
        include_usage: bool,
    ) -> None:
        super().__init__(head, generation, text_of, include_usage)
        self._output = output
        self._parsers = [output.parser() for _ in self._before]

    def delta(self, choice: int, event: Delta) -> bytes:
        deltas = self._parsers[choice].feed(event.text)
        if event.logprobs is None:
            return self._chunks(choice, deltas)
        # Log-probabilities belong to tokens, not to deltas: they are sent with the first delta, or alone.
        logprobs = _encode({"content": chat_entries(event.logprobs, self._text_of), "refusal": None})
        delta = delta_json(deltas[0]) if deltas else b""
        first = self._before[choice] + delta + b'},"logprobs":' + logprobs + b',"finish_reason":null}]'
        return first + self._open_end + self._chunks(choice, deltas[1:])

    async def finished(self, choice: int, event: Finished) -> bytes:
        deltas, reason = await self._output.finish(self._parsers[choice], ended_by(event))
        end = b'},"logprobs":null,"finish_reason":' + _encode(reason) + b"}]"
        return self._chunks(choice, deltas) + self._before[choice] + end + self._open_end

    def _chunks(self, choice: int, deltas: list[OutputDelta]) -> bytes:
        before, after = self._before[choice], self._running
        return b"".join(before + delta_json(delta) + after for delta in deltas)


def chat_chunks(
    head: ResponseHead, generation: Generation, text_of: TokenText, include_usage: bool
) -> ChatChunks:
    """Return the encoder of one stream; that of plain text has no parsers."""
    if generation.output is None:
        return ChatChunks(head, generation, text_of, include_usage)
    return ParsedChatChunks(generation.output, head, generation, text_of, include_usage)


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, object]] | None = None
    finished: Finished | None = None


async def collect_chat(head: ResponseHead, generation: Generation, text_of: TokenText) -> dict[str, object]:
    """Collect the whole response, once every choice has finished. Raises `SchemaNotSatisfied` when one does not satisfy it."""
    choices = [_Choice() for _ in range(generation.choices)]
    async for index, event in generation.events():
        choice = choices[index]
        if isinstance(event, Finished):
            choice.finished = event
            continue
        choice.texts.append(event.text)
        if event.logprobs is not None:
            choice.logprobs = choice.logprobs or []
            choice.logprobs += chat_entries(event.logprobs, text_of)
    return head.fields("chat.completion") | {
        "choices": [await _choice(i, choice, generation.output) for i, choice in enumerate(choices)],
        "usage": usage_of(generation.stats),
    }


async def _choice(index: int, choice: _Choice, output: ConstrainedOutput | None) -> dict[str, object]:
    logprobs = None if choice.logprobs is None else {"content": choice.logprobs, "refusal": None}
    text, calls, reason = await parse_whole(output, choice.texts, choice.finished)
    content = text if text or not calls else None
    message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message["tool_calls"] = calls
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
