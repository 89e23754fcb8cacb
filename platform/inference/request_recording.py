"""Records one chat completion while it runs: the fields of its request that a case of a suite knows, and its first choice.

Invariant: nothing that names a person or a key is recorded beside the conversation itself: no `user`, `metadata`, seed or salt.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec
from msgspec.structs import replace

from loraplex.engine.messages import Delta, Finished
from loraplex.grammar.parsing.deltas import (
    AnswerReason,
    ContentDelta,
    EngineReason,
    OutputDelta,
    join_deltas,
)
from loraplex.platform.errors import describe
from loraplex.platform.evaluations.answers import Answer, Call
from loraplex.platform.evaluations.recorded_suite import CANCELLED, Recording
from loraplex.platform.evaluations.recording import EndedRequest, RecordingQueue
from loraplex.platform.inference.answer_parser import ended_by
from loraplex.platform.inference.generation import ChoiceEvent, Generation
from loraplex.platform.inference.structured_output.constrained_output import ConstrainedOutput
from loraplex.tenants.ids import uuid7

KEPT: Final = frozenset(
    {"messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "stop"}
)
WITHOUT_EFFECT: Final = frozenset(
    {
        *("model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p"),
        *("seed", "n", "stream", "stream_options", "logprobs", "top_logprobs", "prompt_logprobs"),
        *("return_token_ids", "return_tokens_as_token_ids"),
        *("user", "safety_identifier", "metadata", "store", "service_tier", "modalities", "verbosity"),
        *("cache_salt", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    }
)
"""Fields that a case has in another way, or that change nothing of a greedy answer."""


class KeptRequest(NamedTuple):
    """`content`: the JSON object of a body's kept fields. `whole`: no other field has an effect on a greedy answer."""

    content: bytes
    whole: bool


def kept_request(body: Mapping[str, Any]) -> KeptRequest:
    """Return what is kept of a body."""
    given = {name: value for name, value in body.items() if value is not None}
    content = json.dumps({name: given[name] for name in given.keys() & KEPT}, sort_keys=True).encode()
    return KeptRequest(content, given.keys() <= KEPT | WITHOUT_EFFECT)


class RequestRecording:
    """An observer of a generation. It holds its bytes of `queue` until it has ended, or is dropped."""

    def __init__(
        self,
        queue: RecordingQueue,
        kept: KeptRequest,
        tenant_id: UUID,
        base_digest: str,
        generation: Generation,
    ) -> None:
        self._queue = queue
        self._kept = kept
        self._tenant_id = tenant_id
        self._base_digest = base_digest
        self._generation = generation
        self._size = 0
        self._text: bytearray | None = bytearray()
        self._reason: EngineReason | None = None
        self._grow(len(kept.content))

    def observe(self, choice: int, event: ChoiceEvent) -> None:
        """Record an event of the first choice."""
        if choice == 0 and isinstance(event, Delta) and self._text is not None:
            text = event.text.encode()
            self._text += text
            self._grow(len(text))
        elif choice == 0 and isinstance(event, Finished):
            self._reason = ended_by(event)

    def end(self, error: BaseException | None) -> None:
        """Queue the recording of a generation that has ended, by `error` if there is one."""
        if self._text is None:
            return
        if isinstance(error, Exception):
            code = describe(error).row.code
        else:
            code = CANCELLED if self._reason is None else ""
        model, sampling = self._generation.model, self._generation.sampling
        # What was in force, which may be a default: a case has both.
        fields = json.dumps({"max_tokens": sampling.max_tokens, "temperature": sampling.temperature})
        request = self._kept.content[:-1] + b"," + fields.encode()[1:]
        repeatable = self._kept.whole and sampling.temperature == 0
        reason = None if code else self._reason
        answer = Answer(error=code, completion_tokens=self._generation.stats.completion_tokens)
        recording = Recording(msgspec.Raw(request), repeatable, answer)
        ended = EndedRequest(
            id=uuid7(),
            tenant_id=self._tenant_id,
            adapter=model.adapter_name,
            base_digest=self._base_digest,
            created_at=datetime.now(UTC),
            size=self._size,
            read=partial(_recording, recording, self._generation.output, self._text.decode(), reason),
        )
        self._queue.ended.append(ended)

    def _grow(self, size: int) -> None:
        self._size += size
        if not self._queue.hold(self._tenant_id, size, self._size):
            self._queue.release(self._tenant_id, self._size - size)
            self._text = None


def _recording(
    recording: Recording, output: ConstrainedOutput | None, text: str, reason: EngineReason | None
) -> Recording:
    """Add to a recording what a text says, as clients read it. `reason` None: the text is not complete."""
    deltas: list[OutputDelta] = [ContentDelta(text)]
    ended: AnswerReason | None = reason
    if output is not None:
        parser = output.parser()
        deltas = parser.feed(text)
        if reason is not None:
            last, ended = parser.finish(reason)
            deltas += last
    _, content, written = join_deltas(deltas)
    calls = tuple(Call(start.name, arguments) for start, arguments in written)
    answer = replace(recording.answer, text=content, calls=calls, finish_reason=ended or "")
    return replace(recording, answer=answer)
