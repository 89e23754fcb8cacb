"""Large prompts are encoded before admission: a few at a time, in turn by tenant, also when their clients leave.

A prompt that cannot fit is refused without that.
"""

import asyncio
import gc
import threading
from typing import Any

import pytest

from loraplex.platform.errors import ContextTooLong
from loraplex.platform.inference import prompt_encoding
from loraplex.platform.inference.dependencies import ServingConfig
from loraplex.platform.inference.prompting import chat_template

BUSY_S = 180.0
LARGE: Any = {"model": "demo/base", "prompt": "x" * 20_000, "max_tokens": 1}


class Encoding:
    """Holds each encoding of a large prompt until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.running, self.most = 0, 0, 0
        self.error: Exception | None = None
        self.release = threading.Event()
        self._lock = threading.Lock()
        monkeypatch.setattr(prompt_encoding, "MAX_ENCODING", 1)
        monkeypatch.setattr(prompt_encoding.PromptEncoder, "_encode_large", self._encode)

    def _encode(self, *_: Any) -> list[list[int]]:
        with self._lock:
            self.begun, self.running = self.begun + 1, self.running + 1
            self.most = max(self.most, self.running)
        self.release.wait(BUSY_S)
        with self._lock:
            self.running -= 1
        if self.error is not None:
            raise self.error
        return [[3, 4]]

    async def until_begun(self) -> None:
        async with asyncio.timeout(BUSY_S):
            while not self.begun:
                await asyncio.sleep(0.01)


async def test_no_more_are_encoded_at_once_than_the_machine_has_processors_for(
    start_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = Encoding(monkeypatch)
    gateway = await start_gateway()
    requests = [asyncio.create_task(gateway.post("/v1/completions", LARGE)) for _ in range(3)]
    await encoding.until_begun()
    small = await gateway.post("/v1/completions", {**LARGE, "prompt": "hello"})
    assert small.status_code == 200, "it is encoded without a thread"
    encoding.release.set()
    assert [each.status_code for each in await asyncio.gather(*requests)] == [200] * 3
    assert (encoding.begun, encoding.most) == (3, 1)


async def test_a_prompt_of_many_messages_is_large(
    start_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is a conversation that may be shortened, which is encoded several times."""
    encoding = Encoding(monkeypatch)
    encoding.release.set()
    gateway = await start_gateway()
    user = {"role": "user", "content": "a"}
    two = [user, {"role": "assistant", "content": "b"}, user]
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [user] * 1000}),
        ("/v1/responses", {"input": two, "truncation": "auto"}),
    ]
    for number, (path, body) in enumerate(bodies, 1):
        assert (await gateway.post(path, {"model": "demo/base", **body})).status_code == 200
        assert encoding.begun == number


async def test_a_client_that_leaves_frees_its_turn_when_its_prompt_is_encoded(
    start_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = Encoding(monkeypatch)
    gateway = await start_gateway(limits=ServingConfig(key_cache_s=0.0))
    leaving = asyncio.create_task(gateway.post("/v1/completions", LARGE))
    await encoding.until_begun()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    waiting = asyncio.create_task(gateway.post("/v1/completions", LARGE))
    await asyncio.wait({waiting}, timeout=1.0)
    assert encoding.begun == 1
    encoding.release.set()
    assert (await waiting).status_code == 200
    assert (encoding.begun, encoding.most) == (2, 1)


async def test_the_error_of_a_prompt_whose_client_left_is_not_logged(
    start_gateway: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    encoding = Encoding(monkeypatch)
    gateway = await start_gateway(limits=ServingConfig(key_cache_s=0.0))
    encoding.error = ContextTooLong("too long", "prompt")
    leaving = asyncio.create_task(gateway.post("/v1/completions", LARGE))
    await encoding.until_begun()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    next_one = asyncio.create_task(gateway.post("/v1/completions", LARGE))
    await asyncio.wait({next_one}, timeout=1.0)
    encoding.release.set()
    assert (await next_one).status_code == 400
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_a_prompt_that_cannot_fit_is_refused_without_tokenizing_it(
    start_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized: list[int] = []
    tokenize = chat_template._ids

    def watched(tokenizer: Any, text: str, special: bool) -> list[int]:
        tokenized.append(len(text))
        return tokenize(tokenizer, text, special)

    monkeypatch.setattr(chat_template, "_ids", watched)
    gateway = await start_gateway()
    text = "x" * 1_999_000
    chat = {"model": "demo/base", "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    for path, body, param in [
        ("completions", {**LARGE, "prompt": text}, "prompt"),
        ("completions", {**LARGE, "prompt": ["short", text]}, "prompt"),
        ("chat/completions", chat, "messages"),
    ]:
        tokenized.clear()
        response = await gateway.post(f"/v1/{path}", body)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == param and " tokens (at least " in error["message"]
        assert max(tokenized, default=0) <= len("short")
    response = await gateway.post("/v1/tokenize", {"model": "demo/base", "prompt": text})
    assert response.json()["count"] > 4096, "it is counted, whatever the context holds"


async def test_a_prompt_that_may_fit_is_tokenized_and_refused_with_its_size(start_gateway: Any) -> None:
    gateway = await start_gateway()
    response = await gateway.post("/v1/completions", {**LARGE, "prompt": "x" * 20_000})
    assert response.status_code == 400
    assert " 20002 tokens (20001 in the prompt, 1 for the completion)" in response.json()["error"]["message"]
