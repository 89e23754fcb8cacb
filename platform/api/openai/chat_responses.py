"""Answers of `/v1/chat/completions`: the whole object, and the chunks of a stream with pre-encoded envelopes.

Invariant: an answer that was asked for in a form is read by one reader per choice, whether it is streamed or whole.
"""

from dataclasses import dataclass, field

import msgspec

from loraplex.engine.messages import Delta, Finished
from loraplex.grammar.parsing.deltas import OutputDelta
from loraplex.platform.api.openai.logprobs import chat_entries
from loraplex.platform.api.openai.parsed_output import ended_by, piece_delta, read_whole
from loraplex.platform.api.openai.response_envelope import ResponseHead, event_of, usage_of
from loraplex.platform.inference.generation import Generation
from loraplex.platform.inference.prompting.token_text import TokenText
from loraplex.platform.inference.structured_output.constrained_output import ConstrainedOutput

_encode = msgspec.json.encode


class ChatChunks:
    """Encodes one stream: role first, then text, the reason of each choice, and usage when asked."""

    _role = b'"role":"assistant","content":""'

    def __init__(
        self, head: ResponseHead, generation: Generation, text_of: TokenText, include_usage: bool
    ) -> None:
        self._head = head
        self._choices = generation.choices
        self._timings = generation.timings
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
            self._head.fields("chat.completion.chunk") | {"choices": [], "usage": usage_of(self._timings)}
        )


class ParsedChatChunks(ChatChunks):
    """Encodes the stream of an answer with a form: what the reader of each choice makes of its text."""

    # An answer of calls alone has no content.
    _role = b'"role":"assistant","content":null'

    def __init__(
        self,
        answer: ConstrainedOutput,
        head: ResponseHead,
        generation: Generation,
        text_of: TokenText,
        include_usage: bool,
    ) -> None:
        super().__init__(head, generation, text_of, include_usage)
        self._answer = answer
        self._readers = [answer.reader() for _ in self._before]

    def delta(self, choice: int, event: Delta) -> bytes:
        pieces = self._readers[choice].feed(event.text)
        if event.logprobs is None:
            return self._chunks(choice, pieces)
        # Log-probabilities are of tokens, which pieces are not: they come with the first piece, or alone.
        logprobs = _encode({"content": chat_entries(event.logprobs, self._text_of), "refusal": None})
        delta = piece_delta(pieces[0]) if pieces else b""
        first = self._before[choice] + delta + b'},"logprobs":' + logprobs + b',"finish_reason":null}]'
        return first + self._open_end + self._chunks(choice, pieces[1:])

    async def finished(self, choice: int, event: Finished) -> bytes:
        pieces, reason = await self._answer.finish(self._readers[choice], ended_by(event))
        end = b'},"logprobs":null,"finish_reason":' + _encode(reason) + b"}]"
        return self._chunks(choice, pieces) + self._before[choice] + end + self._open_end

    def _chunks(self, choice: int, pieces: list[OutputDelta]) -> bytes:
        before, after = self._before[choice], self._running
        return b"".join(before + piece_delta(piece) + after for piece in pieces)


def chat_chunks(
    head: ResponseHead, generation: Generation, text_of: TokenText, include_usage: bool
) -> ChatChunks:
    """The encoder of one stream; a plain one has no readers."""
    if generation.answer is None:
        return ChatChunks(head, generation, text_of, include_usage)
    return ParsedChatChunks(generation.answer, head, generation, text_of, include_usage)


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, object]] | None = None
    finished: Finished | None = None


async def collect_chat(head: ResponseHead, generation: Generation, text_of: TokenText) -> dict[str, object]:
    """The whole answer, once every choice has finished. Raises `SchemaNotSatisfied` when any choice is not."""
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
        "choices": [await _choice(i, choice, generation.answer) for i, choice in enumerate(choices)],
        "usage": usage_of(generation.timings),
    }


async def _choice(index: int, choice: _Choice, answer: ConstrainedOutput | None) -> dict[str, object]:
    logprobs = None if choice.logprobs is None else {"content": choice.logprobs, "refusal": None}
    text, calls, reason = await read_whole(answer, choice.texts, choice.finished)
    content = text if text or not calls else None
    message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message["tool_calls"] = calls
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
