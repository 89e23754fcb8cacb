"""What vLLM's clients ask for besides the text: token ids of prompts and choices, and usage in every event of a stream.

They are written into the events of another encoder, so that a stream without them costs nothing more.
"""

from typing import Final

import msgspec

from loraplex.engine.messages import Delta, Finished, Scored
from loraplex.platform.errors import ClientError
from loraplex.platform.inference.generation import Generation
from loraplex.platform.web.openai.response_envelope import counted_usage
from loraplex.platform.web.openai.response_models import ChatCompletion, Completion, encoded
from loraplex.platform.web.transport.sse import ChunkEncoder

_END: Final = b"\n\n"
# Line ends of content are escaped, so this is the end of an event.
_NO_USAGE: Final = b'"usage":null}\n\n'


def with_token_ids(
    document: ChatCompletion | Completion, generation: Generation
) -> ChatCompletion | Completion:
    """Add the ids that a generation has kept: those of a chat's prompt to the response, of other prompts to their choices."""
    prompts, choices = generation.prompts, []
    is_chat = isinstance(document, ChatCompletion)
    for index, (choice, ids) in enumerate(zip(document.choices, generation.token_ids or [], strict=True)):
        prompt = {} if is_chat else {"prompt_token_ids": prompts[index // generation.n]}
        choices.append(choice.model_copy(update={"token_ids": ids, **prompt}))
    prompt = {"prompt_token_ids": prompts[0]} if is_chat else {}
    return document.model_copy(update={"choices": choices, **prompt})


class ExtendedChunks:
    """Encodes one stream as `chunks` does, with token ids, or usage, or both.

    The ids of tokens without text of their own come with the next event of their choice. As in vLLM, the prompt's ids are in the
    first chunk of a `chat`, else in the first one of each choice.
    """

    ping = b""

    def __init__(
        self, chunks: ChunkEncoder, generation: Generation, *, token_ids: bool, usage: bool, chat: bool
    ) -> None:
        generation.keep_token_ids()
        self._chunks, self._generation = chunks, generation
        self._with_ids, self._with_usage, self._chat = token_ids, usage, chat
        self._sent: list[int | None] = [None] * generation.choices

    def opening(self) -> bytes:
        events = self._chunks.opening()
        if not self._chat:
            # One event for each choice, or none.
            each = events.split(_END)[:-1]
            return b"".join(self._extended(choice, event + _END) for choice, event in enumerate(each))
        events = self._counted(events, 0, 0)
        if not self._with_ids:
            return events
        return _inserted(events, events.index(_END) - 1, "prompt_token_ids", self._generation.prompts[0])

    def scored(self, choice: int, event: Scored) -> bytes:
        return self._extended(choice, self._chunks.scored(choice, event))

    def delta(self, choice: int, event: Delta) -> bytes:
        return self._extended(choice, self._chunks.delta(choice, event))

    async def finished(self, choice: int, event: Finished) -> bytes:
        return self._extended(choice, await self._chunks.finished(choice, event))

    def closing(self) -> bytes:
        return self._chunks.closing()

    def failed(self, error: ClientError) -> bytes:
        return self._chunks.failed(error)

    def _extended(self, choice: int, events: bytes) -> bytes:
        ids, sent = (self._generation.token_ids or [])[choice], self._sent[choice]
        if events and self._with_ids:
            end = events.rindex(b"}]", 0, events.index(_END))
            if sent is None and not self._chat:
                prompt = self._generation.prompts[choice // self._generation.n]
                events = _inserted(events, end, "prompt_token_ids", prompt)
            events = _inserted(events, end, "token_ids", ids[sent or 0 :])
            self._sent[choice] = len(ids)
        return self._counted(events, choice // self._generation.n, len(ids))

    def _counted(self, events: bytes, prompt: int, completion_tokens: int) -> bytes:
        """Replace the null of `usage` by the tokens of one prompt, and those that one of its choices has so far."""
        if not self._with_usage or not events:
            return events
        tokens, cached = self._generation.stats.prompt_usage(prompt)
        counted = encoded(counted_usage(tokens, completion_tokens, cached))
        return events.replace(_NO_USAGE, b'"usage":' + counted + b"}\n\n")


def _inserted(events: bytes, at: int, name: str, ids: list[int]) -> bytes:
    return events[:at] + b',"%s":' % name.encode() + msgspec.json.encode(ids) + events[at:]
