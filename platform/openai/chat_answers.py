"""Answers of `/v1/chat/completions`: the whole object, and the chunks of a stream with pre-encoded envelopes."""

from dataclasses import dataclass, field

import msgspec

from loraplex.engine.messages import Delta, Finished
from loraplex.platform.generation import Generation
from loraplex.platform.openai.envelope import AnswerHead, event_of
from loraplex.platform.openai.logprobs import chat_entries
from loraplex.platform.openai.usage import usage_of
from loraplex.platform.token_text import TokenText

_encode = msgspec.json.encode


class ChatChunks:
    """Encodes one stream: role first, then text, the reason of each choice, and usage when asked."""

    def __init__(
        self, head: AnswerHead, generation: Generation, text_of: TokenText, include_usage: bool
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
        role = b'"role":"assistant","content":""'
        return b"".join(before + role + self._running for before in self._before)

    def delta(self, choice: int, event: Delta) -> bytes:
        if event.logprobs is None:
            if not event.text:
                return b""
            return self._before[choice] + b'"content":' + _encode(event.text) + self._running
        logprobs = _encode({"content": chat_entries(event.logprobs, self._text_of), "refusal": None})
        text = b'"content":' + _encode(event.text) + b'},"logprobs":'
        return self._before[choice] + text + logprobs + b',"finish_reason":null}]' + self._open_end

    def finished(self, choice: int, event: Finished) -> bytes:
        reason = b'},"logprobs":null,"finish_reason":' + _encode(event.reason) + b"}]"
        return self._before[choice] + reason + self._open_end

    def closing(self) -> bytes:
        if not self._include_usage:
            return b""
        return event_of(
            self._head.fields("chat.completion.chunk") | {"choices": [], "usage": usage_of(self._timings)}
        )


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, object]] | None = None
    reason: str = ""


async def collect_chat(head: AnswerHead, generation: Generation, text_of: TokenText) -> dict[str, object]:
    """The whole answer, once every choice has finished."""
    choices = [_Choice() for _ in range(generation.choices)]
    async for index, event in generation.events():
        choice = choices[index]
        if isinstance(event, Finished):
            choice.reason = event.reason
            continue
        choice.texts.append(event.text)
        if event.logprobs is not None:
            choice.logprobs = (choice.logprobs or []) + chat_entries(event.logprobs, text_of)
    return head.fields("chat.completion") | {
        "choices": [_choice(index, choice) for index, choice in enumerate(choices)],
        "usage": usage_of(generation.timings),
    }


def _choice(index: int, choice: _Choice) -> dict[str, object]:
    logprobs = None if choice.logprobs is None else {"content": choice.logprobs, "refusal": None}
    message = {"role": "assistant", "content": "".join(choice.texts), "refusal": None}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.reason}
