"""Responses of `/v1/chat/completions`: the non-streaming object, and the chunks of a stream with pre-encoded envelopes.

Invariant: constrained output is parsed by one parser per choice, whether it is streamed or not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from loraplex.engine.messages import Delta, Finished, Scored, TokenLogprob
from loraplex.grammar.parsing.deltas import OutputDelta
from loraplex.platform.inference.answer_parser import AnswerParser
from loraplex.platform.inference.generation import Generation
from loraplex.platform.inference.prompting.token_text import TextOf
from loraplex.platform.web.openai.logprobs import chat_entries, chat_logprobs, prompt_logprobs
from loraplex.platform.web.openai.parsed_output import Chunks, delta_json, gathered
from loraplex.platform.web.openai.response_envelope import ResponseHead, usage_of
from loraplex.platform.web.openai.response_models import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChosenTokenLogprob,
    ChunkChoice,
    FinishReason,
    MessageDelta,
    ResponseMessage,
    encoded,
)

_encode = msgspec.json.encode


class ChatChunks(Chunks[ChunkChoice]):
    """Encodes one stream: role first, then text, the `finish_reason` of each choice, and usage when requested.

    The chunks of text are cut from one that the model has encoded: a model for each delta would cost several times as much.
    """

    def __init__(
        self, head: ResponseHead, generation: Generation, text_of: TextOf, include_usage: bool
    ) -> None:
        empty = ChunkChoice(index=0, delta=MessageDelta(content=""), logprobs=None, finish_reason=None)
        super().__init__(head, generation, include_usage, empty, b'"content":""')
        self._text_of = text_of

    def opening(self) -> bytes:
        role = encoded(self._role())[1:-1]
        return b"".join(self._frame.event(choice, role) for choice in range(len(self._before)))

    def scored(self, choice: int, event: Scored) -> bytes:
        """A stream has no scores of the prompt."""
        return b""

    def delta(self, choice: int, event: Delta) -> bytes:
        if event.logprobs is not None:
            return self._with_logprobs(choice, b'"content":' + _encode(event.text), event.logprobs)
        if not event.text:
            return b""
        return self._before[choice] + b'"content":' + _encode(event.text) + self._running

    async def finished(self, choice: int, event: Finished) -> bytes:
        deltas, reason = await self._ended(choice, event)
        return self._chunks(choice, deltas) + self._frame.event(choice, b"", reason=_encode(reason))

    def _role(self) -> MessageDelta:
        return MessageDelta(role="assistant", content="")

    def _with_logprobs(self, choice: int, delta: bytes, tokens: Sequence[TokenLogprob]) -> bytes:
        logprobs = _encode({"content": chat_entries(tokens, self._text_of), "refusal": None})
        return self._frame.event(choice, delta, logprobs)

    def _chunks(self, choice: int, deltas: list[OutputDelta]) -> bytes:
        before, after = self._before[choice], self._running
        return b"".join(before + delta_json(delta) + after for delta in deltas)

    def _chunk(self, choices: list[ChunkChoice], **with_usage: Any) -> ChatCompletionChunk:
        fields = self._head.fields(self._stats)
        return ChatCompletionChunk(object="chat.completion.chunk", choices=choices, **fields, **with_usage)


class ParsedChatChunks(ChatChunks):
    """Encodes the stream of constrained output: the deltas that the parser of each choice makes of its text."""

    def delta(self, choice: int, event: Delta) -> bytes:
        deltas = self._parser.feed(choice, event)
        if event.logprobs is None:
            return self._chunks(choice, deltas)
        # Log-probabilities belong to tokens, not to deltas: they are sent with the first delta, or alone.
        first = self._with_logprobs(choice, delta_json(deltas[0]) if deltas else b"", event.logprobs)
        return first + self._chunks(choice, deltas[1:])

    def _role(self) -> MessageDelta:
        # A response of tool calls alone has no content.
        return MessageDelta(role="assistant", content=None)


def chat_chunks(
    head: ResponseHead, generation: Generation, text_of: TextOf, include_usage: bool
) -> ChatChunks:
    """Return the encoder of one stream; that of plain text has no parsers."""
    chunks = ChatChunks if generation.output is None else ParsedChatChunks
    return chunks(head, generation, text_of, include_usage)


@dataclass(slots=True)
class _CollectedChoice:
    deltas: list[OutputDelta] = field(default_factory=list)
    logprobs: list[ChosenTokenLogprob] | None = None
    reason: FinishReason = "length"


async def collect_chat(head: ResponseHead, generation: Generation, text_of: TextOf) -> ChatCompletion:
    """Collect the non-streaming response, once every choice has finished. Raises `SchemaNotSatisfied`."""
    choices = [_CollectedChoice() for _ in range(generation.choices)]
    parser = AnswerParser(generation)
    scored: Scored | None = None
    async for index, event in generation.events():
        choice = choices[index]
        if isinstance(event, Delta):
            choice.deltas += parser.feed(index, event)
            if event.logprobs is not None:
                choice.logprobs = choice.logprobs or []
                choice.logprobs += chat_entries(event.logprobs, text_of)
        elif isinstance(event, Finished):
            last, choice.reason = await parser.finish(index, event)
            choice.deltas += last
        else:
            scored = event
    return ChatCompletion(
        object="chat.completion",
        **head.fields(generation.stats),
        choices=[_chat_choice(i, choice, generation) for i, choice in enumerate(choices)],
        usage=usage_of(generation.stats),
        **prompt_logprobs(generation, scored, text_of),
    )


def _chat_choice(index: int, choice: _CollectedChoice, generation: Generation) -> ChatChoice:
    thought, text, calls = gathered(choice.deltas)
    content = text if text or not calls else None
    parts: dict[str, Any] = {"reasoning": thought, "reasoning_content": thought} if thought else {}
    if calls:
        parts["tool_calls"] = calls
    message = ResponseMessage(role="assistant", content=content, refusal=None, **parts)
    return ChatChoice(
        index=index,
        message=message,
        logprobs=None if choice.logprobs is None else chat_logprobs(choice.logprobs),
        finish_reason=choice.reason,
        **generation.choice_probabilities(index),
    )
