"""Streams of `/v1` of every form, as the data of their events."""

from collections.abc import Mapping
from typing import Any, Final

from tests.platform.web.openai.test_tools import CALLS, ONE, WEATHER

from loraplex.engine.fake_engine import FakeScript

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
_MESSAGES: Final = {"model": "demo/base", "messages": [{"role": "user", "content": "hello"}]}
_PROMPT: Final = {"model": "demo/base", "prompt": ["a", "b"]}
_USAGE: Final = {"stream_options": {"include_usage": True}}
_TEXTS: Final = FakeScript(answers=(("Hello", " wörld\n", '"!"'), ("Other",)))
_CALLS: Final = FakeScript(answers=(CALLS, ONE))
STREAMS: Final[Mapping[str, tuple[FakeScript, str, dict[str, Any]]]] = {
    "text": (_TEXTS, CHAT, _MESSAGES),
    "choices": (_TEXTS, CHAT, {**_MESSAGES, **_USAGE, "n": 12}),
    "logprobs": (_TEXTS, CHAT, {**_MESSAGES, **_USAGE, "logprobs": True, "top_logprobs": 2}),
    "calls": (_CALLS, CHAT, {**_MESSAGES, **_USAGE, "tools": [WEATHER], "n": 2}),
    "calls-logprobs": (_CALLS, CHAT, {**_MESSAGES, "tools": [WEATHER], "logprobs": True}),
    "completions": (_TEXTS, COMPLETIONS, {**_PROMPT, **_USAGE, "n": 2}),
    "completions-echo": (_TEXTS, COMPLETIONS, {**_PROMPT, **_USAGE, "prompt": ["a", "b c d"], "echo": True}),
    "completions-echo-logprobs": (_TEXTS, COMPLETIONS, {**_PROMPT, "n": 2, "echo": True, "logprobs": 2}),
    "completions-logprobs": (_TEXTS, COMPLETIONS, {**_PROMPT, "logprobs": 2}),
    "completions-regex": (_TEXTS, COMPLETIONS, {**_PROMPT, "structured_outputs": {"regex": ".*"}}),
}
"""name -> script of the engine, path, body"""


async def chunks_of(gateway: Any, path: str, body: Mapping[str, Any]) -> list[bytes]:
    """Return the data of every event but the last one, which is `[DONE]`."""
    response = await gateway.post(path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    *events, done, rest = response.content.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert all(event.startswith(b"data: {") for event in events)
    return [event.removeprefix(b"data: ") for event in events]
