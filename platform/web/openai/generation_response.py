"""The response of `/v1/chat/completions` and `/v1/completions`: what it needs of its body, and how it is written."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeAlias
from uuid import uuid4

from loraplex.platform.inference.generation import Generation
from loraplex.platform.inference.prompting.token_text import TextOf
from loraplex.platform.parameters.request_models import GenerationBody, StreamOptions
from loraplex.platform.web.inference_plane import DialectContext
from loraplex.platform.web.openai.response_envelope import ResponseHead
from loraplex.platform.web.openai.response_models import ChatCompletion, Completion, encoded
from loraplex.platform.web.openai.token_ids import ExtendedChunks, with_token_ids
from loraplex.platform.web.transport.sse import ChunkEncoder

Collect: TypeAlias = Callable[[ResponseHead, Generation, TextOf], Awaitable[ChatCompletion | Completion]]
Encoder: TypeAlias = Callable[[ResponseHead, Generation, TextOf, bool], ChunkEncoder]
NO_STREAM_OPTIONS: Final = StreamOptions()


@dataclass(frozen=True, slots=True)
class GenerationWriter:
    """How one of the two endpoints writes. `prefix`: of the ids of its responses. `chat`: its chunks have deltas."""

    prefix: str
    encoder: Encoder
    collector: Collect
    chat: bool

    def respond(self, values: GenerationBody, context: DialectContext) -> "GenerationResponse":
        """Return the response to a body."""
        return GenerationResponse(
            writer=self,
            head=ResponseHead(f"{self.prefix}-{uuid4().hex}", int(time.time()), values.model),
            stream=values.stream,
            options=values.stream_options or NO_STREAM_OPTIONS,
            token_ids=values.return_token_ids,
            text_of=context.text.numbered if values.return_tokens_as_token_ids else context.text,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResponse:
    """A `DialectResponse`. `token_ids`: it has the ids of tokens, too."""

    writer: GenerationWriter
    head: ResponseHead
    stream: bool
    options: StreamOptions
    token_ids: bool
    text_of: TextOf

    @property
    def id(self) -> str:
        """The id of the response."""
        return self.head.id

    def chunks(self, generation: Generation) -> ChunkEncoder:
        """Return what writes the events of a stream."""
        usage = self.options.include_usage
        chunks = self.writer.encoder(self.head, generation, self.text_of, usage)
        usage = usage and self.options.continuous_usage_stats
        if not self.token_ids and not usage:
            return chunks
        return ExtendedChunks(
            chunks, generation, token_ids=self.token_ids, usage=usage, chat=self.writer.chat
        )

    async def collect(self, generation: Generation) -> bytes:
        """Wait for the end of the generation, and return the non-streaming response as JSON."""
        if self.token_ids:
            generation.keep_token_ids()
        document = await self.writer.collector(self.head, generation, self.text_of)
        return encoded(with_token_ids(document, generation) if self.token_ids else document)
