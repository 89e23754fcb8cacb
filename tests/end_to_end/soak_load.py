"""Mixed traffic of two tenants for a soak: responses of every kind, errors, disconnects, keys and uploads.

Invariant: every action knows which statuses are right; any other one is counted as a fault.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx

MODEL = "bench-base"
PAUSE_S = 0.02
SCHEMAS = 300
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


@dataclass
class SoakLoad:
    """Paced workers, each of which runs one random action after another."""

    base_url: str
    api_keys: tuple[str, str]
    admin_key: str
    adapter: Path
    done: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    uploads: "count[int]" = field(default_factory=count)

    async def run(self, seconds: float, workers: int) -> None:
        """Run the load for `seconds`."""
        limits = httpx.Limits(max_connections=4 * workers, max_keepalive_connections=workers)
        async with httpx.AsyncClient(base_url=self.base_url, timeout=300, limits=limits) as client:
            ends_at = asyncio.get_running_loop().time() + seconds
            await asyncio.gather(*(self._work(client, ends_at, seed) for seed in range(workers)))

    async def _work(self, client: httpx.AsyncClient, ends_at: float, seed: int) -> None:
        drawn = random.Random(seed)
        actions = self._actions(client)
        names, weights = list(actions), [WEIGHTS[name] for name in actions]
        while asyncio.get_running_loop().time() < ends_at:
            (name,) = drawn.choices(names, weights)
            fault = await actions[name](drawn)
            self.done[name] += 1
            if fault is not None:
                self.faults[f"{name}: {fault}"] += 1
            await asyncio.sleep(PAUSE_S)

    def _actions(
        self, client: httpx.AsyncClient
    ) -> dict[str, Callable[[random.Random], Awaitable[str | None]]]:
        async def stream(drawn: random.Random) -> str | None:
            return await self._stream(client, drawn, leave_after=None)

        async def leave(drawn: random.Random) -> str | None:
            return await self._stream(client, drawn, leave_after=2)

        async def chat(drawn: random.Random) -> str | None:
            return await self._post(client, drawn, chat_body(drawn), 200)

        async def choices(drawn: random.Random) -> str | None:
            return await self._post(client, drawn, chat_body(drawn) | {"n": 4}, 200)

        async def schema(drawn: random.Random) -> str | None:
            # The scripted engine obeys no grammar: its text may fail the validation of the value.
            return await self._post(client, drawn, chat_body(drawn) | schema_form(drawn), 200, 422)

        async def tool(drawn: random.Random) -> str | None:
            return await self._post(client, drawn, chat_body(drawn) | {"tools": [TOOL]}, 200)

        async def invalid(drawn: random.Random) -> str | None:
            return await self._post(client, drawn, {"model": MODEL, "messages": drawn.random()}, 400)

        async def unknown(drawn: random.Random) -> str | None:
            body = chat_body(drawn) | {"model": f"missing-{drawn.randrange(1 << 30)}"}
            return await self._post(client, drawn, body, 404)

        async def forged(drawn: random.Random) -> str | None:
            headers = {"authorization": f"Bearer lpx_live_{drawn.randrange(1 << 60):016x}"}
            response = await client.post("/v1/chat/completions", json=chat_body(drawn), headers=headers)
            return wrong_status(response, 401)

        async def manage(_: random.Random) -> str | None:
            return await self._manage(client)

        async def upload(_: random.Random) -> str | None:
            return await self._upload(client, f"soak-{next(self.uploads)}")

        async def scrape(_: random.Random) -> str | None:
            return wrong_status(await client.get("/metrics"), 200)

        return {
            "stream": stream,
            "leave": leave,
            "chat": chat,
            "choices": choices,
            "schema": schema,
            "tool": tool,
            "invalid": invalid,
            "unknown": unknown,
            "forged": forged,
            "manage": manage,
            "upload": upload,
            "scrape": scrape,
        }

    def _bearer(self, drawn: random.Random) -> dict[str, str]:
        return {"authorization": f"Bearer {drawn.choice(self.api_keys)}"}

    async def _post(
        self, client: httpx.AsyncClient, drawn: random.Random, body: dict[str, Any], *right: int
    ) -> str | None:
        response = await client.post("/v1/chat/completions", json=body, headers=self._bearer(drawn))
        return wrong_status(response, *right)

    async def _stream(
        self, client: httpx.AsyncClient, drawn: random.Random, leave_after: int | None
    ) -> str | None:
        body = chat_body(drawn) | {"stream": True}
        async with client.stream(
            "POST", "/v1/chat/completions", json=body, headers=self._bearer(drawn)
        ) as response:
            if response.status_code != httpx.codes.OK:
                return f"HTTP {response.status_code}"
            last, seen = "", 0
            async for line in response.aiter_lines():
                last = line or last
                seen += bool(line)
                if leave_after is not None and seen >= leave_after:
                    return None
            return None if last == "data: [DONE]" else f"ended with {last[:80]}"

    async def _manage(self, client: httpx.AsyncClient) -> str | None:
        headers = {"authorization": f"Bearer {self.admin_key}"}
        made = await client.post("/tenant/v1/keys", json={"name": "soak"}, headers=headers)
        if made.status_code != httpx.codes.CREATED:
            return f"HTTP {made.status_code}: {made.text[:200]}"
        await client.get("/tenant/v1/quotas", headers=headers)
        revoked = await client.delete(f"/tenant/v1/keys/{made.json()['id']}", headers=headers)
        return wrong_status(revoked, 200, 204)

    async def _upload(self, client: httpx.AsyncClient, name: str) -> str | None:
        headers = {"authorization": f"Bearer {self.admin_key}"}
        created = await client.post("/tenant/v1/adapters", json={"name": name}, headers=headers)
        if created.status_code != httpx.codes.CREATED:
            return f"HTTP {created.status_code}: {created.text[:200]}"
        names = ("adapter_config.json", "adapter_model.safetensors")
        files = {each: (each, (self.adapter / each).read_bytes()) for each in names}
        sent = await client.post(f"/tenant/v1/adapters/{name}/versions", files=files, headers=headers)
        if sent.status_code != httpx.codes.ACCEPTED:
            return f"HTTP {sent.status_code}: {sent.text[:200]}"
        state = await self._settled_state(client, name, headers)
        await client.delete(f"/tenant/v1/adapters/{name}", headers=headers)
        return None if state == "ready" else f"the version is {state}"

    async def _settled_state(self, client: httpx.AsyncClient, name: str, headers: dict[str, str]) -> str:
        for _ in range(600):
            version = await client.get(f"/tenant/v1/adapters/{name}/versions/1", headers=headers)
            state = str(version.json().get("state"))
            if state not in ("uploading", "validating"):
                return state
            await asyncio.sleep(0.1)
        return state


WEIGHTS = {
    "stream": 30,
    "leave": 15,
    "chat": 20,
    "choices": 8,
    "schema": 8,
    "tool": 4,
    "invalid": 4,
    "unknown": 4,
    "forged": 4,
    "manage": 2,
    "upload": 0.5,
    "scrape": 1,
}


def chat_body(drawn: random.Random) -> dict[str, Any]:
    text = " ".join(f"word{drawn.randrange(10_000)}" for _ in range(drawn.randrange(4, 120)))
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 24}


def schema_form(drawn: random.Random) -> dict[str, Any]:
    schema = {"type": "object", "properties": {f"field{drawn.randrange(SCHEMAS)}": {"type": "string"}}}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "soak", "schema": schema}}}


def wrong_status(response: httpx.Response, *right: int) -> str | None:
    """None when the status is one of `right`."""
    if response.status_code in right:
        return None
    return f"HTTP {response.status_code}: {response.text[:400]}"
