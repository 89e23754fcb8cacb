"""Clients of two tenants that keep the `usage` of every answer: whole ones, streams, and clients that leave.

Invariant: a request is finished once its client has its end. Of one that was left, its client knows what it has received.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from typing import Any, Final

import httpx
import msgspec

from loraplex.engine.fake_engine import FakeScript

CACHED_TOKENS: Final = 5
START_S: Final = 0.02
SCRIPT: Final = FakeScript(
    start_delay_s=START_S, token_interval_s=0.003, cached_tokens=CACHED_TOKENS, prefilled_tokens=7
)
TOKEN: Final = " w"
"""Begins the text of each of the engine's tokens."""


@dataclass(frozen=True)
class Tokens:
    """Of one request, in disjoint classes."""

    uncached: int
    cached: int
    completion: int


@dataclass(frozen=True)
class Caller:
    """A tenant's key, and the models that it asks for; `base` is the base model."""

    tenant: str
    key: str
    models: tuple[str, ...]


@dataclass
class Asked:
    """A request. `expected`: what it uses if it ends by itself. `received`: tokens of a client that left; `left_in` where."""

    tenant: str
    model: str
    expected: Tokens
    sent_at: datetime
    ended_at: datetime | None = None
    charged: Tokens | None = None
    received: int = 0
    left_in: str | None = None


@dataclass
class PricedLoad:
    """`workers` clients at work until `end`. `kinds`: how many answers of each kind were finished, by the names of kinds."""

    url: str
    callers: tuple[Caller, ...]
    now: Callable[[], datetime]
    workers: int = 12
    requests: dict[str, Asked] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    finished: int = 0
    _over: bool = False
    _numbers: Iterator[int] = field(default_factory=count)

    async def run(self) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as client:
            await asyncio.gather(*(self._work(client, random.Random(seed)) for seed in range(self.workers)))

    def end(self) -> None:
        """Let the requests in progress end."""
        self._over = True

    async def _work(self, client: httpx.AsyncClient, drawn: random.Random) -> None:
        while not self._over:
            caller, name = drawn.choice(self.callers), f"request-{next(self._numbers)}"
            body, expected = draw_body(drawn, drawn.choice(caller.models))
            asked = Asked(caller.tenant, body["model"], expected, self.now())
            self.requests[name] = asked
            headers = {"authorization": f"Bearer {caller.key}", "x-request-id": name}
            await self._ask(client, asked, headers, body, drawn)
            asked.ended_at = self.now()

    async def _ask(
        self,
        client: httpx.AsyncClient,
        asked: Asked,
        headers: dict[str, str],
        body: dict[str, Any],
        drawn: random.Random,
    ) -> None:
        kind = drawn.choices(("whole", "stream", "leaves stream", "leaves prefill"), (4, 4, 1, 1))[0]
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        match kind:
            case "whole":
                await self._whole(client, asked, headers, body)
            case "stream":
                await self._streamed(client, asked, headers, streamed, None)
            case "leaves stream":
                await self._streamed(client, asked, headers, streamed, drawn.randrange(1, 4))
            case _:
                await self._leave_prefill(client, asked, headers, drawn.choice((body, streamed)), drawn)
        if asked.charged is not None:
            self.finished += 1
            self.kinds[kind] += 1
            self.kinds["n > 1"] += body["n"] > 1
            self.kinds["cached"] += asked.charged.cached > 0

    async def _leave_prefill(
        self,
        client: httpx.AsyncClient,
        asked: Asked,
        headers: dict[str, str],
        body: dict[str, Any],
        drawn: random.Random,
    ) -> None:
        answered = self._streamed if "stream" in body else self._whole
        arguments: Any = (client, asked, headers, body, *([None] if "stream" in body else []))
        try:
            async with asyncio.timeout(drawn.uniform(0.3, 1.5) * START_S):
                await answered(*arguments)
        except TimeoutError:
            asked.left_in = "prefill" if asked.received == 0 else "stream"

    async def _whole(
        self, client: httpx.AsyncClient, asked: Asked, headers: dict[str, str], body: dict[str, Any]
    ) -> None:
        response = await client.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == httpx.codes.OK, response.text
        asked.charged = tokens_of(response.json()["usage"])

    async def _streamed(
        self,
        client: httpx.AsyncClient,
        asked: Asked,
        headers: dict[str, str],
        body: dict[str, Any],
        leaves_after: int | None,
    ) -> None:
        usage: dict[str, Any] | None = None
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            assert response.status_code == httpx.codes.OK, await response.aread()
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    assert usage is not None
                    asked.charged = tokens_of(usage)
                    return
                if line.startswith("data: "):
                    event = msgspec.json.decode(line.removeprefix("data: "))
                    usage = event.get("usage") or usage
                    asked.received += sum(choice["text"].count(TOKEN) for choice in event["choices"])
                    if leaves_after is not None and asked.received >= leaves_after:
                        asked.left_in = "stream"
                        return


def draw_body(drawn: random.Random, model: str) -> tuple[dict[str, Any], Tokens]:
    """A request of one or two prompts, some shorter than the cached prefix, with one or more answers each; and its tokens."""
    lengths = [drawn.randrange(2, 30) for _ in range(drawn.choice((1, 1, 2)))]
    n, longest = drawn.choice((1, 1, 2, 3)), drawn.randrange(2, 12)
    body = {
        "model": model,
        "prompt": [[drawn.randrange(3, 400) for _ in range(length)] for length in lengths],
        "n": n,
        "max_tokens": longest,
        "ignore_eos": True,
    }
    cached = sum(min(length, CACHED_TOKENS) for length in lengths)
    return body, Tokens(sum(lengths) - cached, cached, len(lengths) * n * longest)


def tokens_of(usage: dict[str, Any]) -> Tokens:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Tokens(usage["prompt_tokens"] - cached, cached, usage["completion_tokens"])
