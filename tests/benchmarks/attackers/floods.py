"""Attackers of what tenants share, to measure what another tenant notices of them.

Invariant: an attacker sends for its whole duration and counts every answer, whatever the server does.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import repeat
from typing import Final, TypeAlias

import httpx

from loraplex.platform.bench.local_server import BASE_MODEL
from loraplex.tenants.api_keys.key_format import generate_key

Attack: TypeAlias = Callable[[str, str, float], Awaitable[Counter[int]]]
"""(base address, the attacker's key, seconds) -> the answers by status; 0 counts broken connections."""
REQUESTS_AT_ONCE: Final = 40
PROMPTS: Final = 64
FORGED_AT_ONCE: Final = 32
TIMEOUT_S: Final = 60.0


async def flood_with_prompts(base_url: str, api_key: str, duration_s: float, *, n: int = 1) -> Counter[int]:
    """Send `REQUESTS_AT_ONCE` requests of `PROMPTS` prompts, `n` choices each, again and again."""
    body = {"model": BASE_MODEL, "prompt": [[1, 2, 3, 4]] * PROMPTS, "n": n, "max_tokens": 16}
    headers = {"authorization": f"Bearer {api_key}"}

    async def send(http: httpx.AsyncClient) -> httpx.Response:
        return await http.post("/v1/completions", json=body, headers=headers)

    return await _attack(base_url, duration_s, REQUESTS_AT_ONCE, send)


async def flood_with_forged_keys(base_url: str, _api_key: str, duration_s: float) -> Counter[int]:
    """Present well-formed keys that do not exist, each once, on `FORGED_AT_ONCE` connections."""

    async def send(http: httpx.AsyncClient) -> httpx.Response:
        headers = {"authorization": f"Bearer {generate_key('live').plaintext}"}
        return await http.get("/v1/models", headers=headers)

    return await _attack(base_url, duration_s, FORGED_AT_ONCE, send)


async def _attack(
    base_url: str,
    duration_s: float,
    at_once: int,
    send: Callable[[httpx.AsyncClient], Awaitable[httpx.Response]],
) -> Counter[int]:
    """Send one request after another on each of `at_once` connections until the time is over."""
    answers, end = Counter[int](), time.monotonic() + duration_s
    limits = httpx.Limits(max_connections=at_once)

    async def one_after_another(http: httpx.AsyncClient) -> None:
        while time.monotonic() < end:
            try:
                answers[(await send(http)).status_code] += 1
            except httpx.TransportError:
                answers[0] += 1

    async with httpx.AsyncClient(base_url=base_url, limits=limits, timeout=TIMEOUT_S) as http:
        await asyncio.gather(*map(one_after_another, repeat(http, at_once)))
    return answers
