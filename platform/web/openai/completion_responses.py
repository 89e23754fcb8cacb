"""Responses of `/v1/completions`: the non-streaming object, and the chunks of a stream with pre-encoded envelopes."""

from typing import Any

import msgspec

from loraplex.engine.messages import Delta, Finished, Scored
from loraplex.grammar.parsing.deltas import EngineReason
from loraplex.platform.inference.answer_parser import AnswerParser, ended_by
from loraplex.platform.inference.generation import Generation
from loraplex.platform.inference.prompting.token_text import TextOf
from loraplex.platform.observability.request_stats import RequestStats
from loraplex.platform.web.openai.logprobs import CompletionLogprobs, prompt_logprobs
from loraplex.platform.web.openai.parsed_output import Chunks
from loraplex.platform.web.openai.response_envelope import ResponseHead, usage_of
from loraplex.platform.web.openai.response_models import (
    Completion,
    CompletionChoice,
    Usage,
    encoded,
)

_encode = msgspec.json.encode


class CompletionChunks(Chunks[CompletionChoice]):
    """Encodes one stream: text, the `finish_reason` of each choice, and usage when requested.

    The text of constrained output is sent unchanged, and validated at its end.
    """

    def __init__(
        self, head: ResponseHead, generation: Generation, text_of: TextOf, include_usage: bool
    ) -> None:
        empty = CompletionChoice(index=0, text="", logprobs=None, finish_reason=None)
        super().__init__(head, generation, include_usage, empty, b'""')
        self._generation = generation
        self._logprobs = [CompletionLogprobs(text_of) for _ in range(generation.choices)]

    def opening(self) -> bytes:
        output = self._generation.prompt_output
        if output.echo is None or output.echo_logprobs is not None:
            return b""
        choices = range(len(self._before))
        return b"".join(self._frame.event(c, _encode(self._generation.echo(c))) for c in choices)

    def scored(self, choice: int, event: Scored) -> bytes:
        logprobs, generation = self._logprobs[choice], self._generation
        if not _add_prompt(logprobs, generation, choice, event):
            return b""
        return self._frame.event(choice, _encode(generation.echo(choice)), encoded(logprobs.take()))

    def delta(self, choice: int, event: Delta) -> bytes:
        self._parser.feed(choice, event)
        if event.logprobs is None:
            return self._before[choice] + _encode(event.text) + self._running if event.text else b""
        logprobs = self._logprobs[choice]
        logprobs.add(event.logprobs)
        return self._frame.event(choice, _encode(event.text), encoded(logprobs.take()))

    async def finished(self, choice: int, event: Finished) -> bytes:
        await self._ended(choice, event)
        return self._frame.event(choice, b'""', reason=_encode(ended_by(event)))

    def _chunk(self, choices: list[CompletionChoice], **with_usage: Usage | None) -> Completion:
        return _completion(self._head, self._stats, choices, **with_usage)


async def collect_completion(head: ResponseHead, generation: Generation, text_of: TextOf) -> Completion:
    """Collect the non-streaming response, once every choice of every prompt has finished. Raises `SchemaNotSatisfied`."""
    parser = AnswerParser(generation)
    texts: list[list[str]] = [[] for _ in range(generation.choices)]
    logprobs = [CompletionLogprobs(text_of) for _ in texts]
    reasons: list[EngineReason] = ["length"] * generation.choices
    scored: list[Scored | None] = [None] * generation.choices
    with_logprobs = False
    async for choice, event in generation.events():
        if isinstance(event, Delta):
            parser.feed(choice, event)
            texts[choice].append(event.text)
            if event.logprobs is not None:
                with_logprobs = True
                logprobs[choice].add(event.logprobs)
        elif isinstance(event, Finished):
            await parser.finish(choice, event)
            reasons[choice] = ended_by(event)
        else:
            scored[choice] = event
            with_logprobs |= _add_prompt(logprobs[choice], generation, choice, event)
    choices = [
        CompletionChoice(
            index=choice,
            text=generation.echo(choice) + "".join(texts[choice]),
            logprobs=logprobs[choice].take() if with_logprobs else None,
            finish_reason=reasons[choice],
            **prompt_logprobs(generation, scored[choice], text_of),
            **generation.choice_probabilities(choice),
        )
        for choice in range(generation.choices)
    ]
    return _completion(head, generation.stats, choices, usage=usage_of(generation.stats))


def _add_prompt(logprobs: CompletionLogprobs, generation: Generation, choice: int, event: Scored) -> bool:
    """Begin the log-probabilities of a choice with those of its prompt, if it repeats them."""
    count = generation.prompt_output.echo_logprobs
    if count is None or event.prompt is None:
        return False
    logprobs.add_prompt(generation.first_token(choice), event.prompt, count)
    return True


def _completion(
    head: ResponseHead, stats: RequestStats, choices: list[CompletionChoice], **with_usage: Any
) -> Completion:
    return Completion(object="text_completion", choices=choices, **head.fields(stats), **with_usage)
