"""What every claim is tried with: the demo's keys, its API over HTTP, and the command that repeats a request."""

import shlex
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from loraplex.platform.demo.demo_file import DemoAccess
from loraplex.platform.demo.snippet import QUESTION
from loraplex.platform.drills.installation import Installation
from loraplex.platform.startup_errors import RequestFailed


class Found(NamedTuple):
    """Whether a claim held, what was sent, what came back, and a command that repeats it or its central request."""

    held: bool
    sent: str
    got: str
    repeat: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """One claim's visit. What it makes in the demo it gives to `cleanup`, which runs at its end."""

    access: DemoAccess
    http: httpx.AsyncClient = field(repr=False)
    installation: Installation
    cleanup: AsyncExitStack

    async def send(
        self,
        method: str,
        path: str,
        key: str,
        body: object = None,
        *,
        expected: tuple[int, ...] = (200,),
        etag: str = "",
    ) -> httpx.Response:
        """Send a request. Raises `RequestFailed` for another status than those `expected`, and `httpx.HTTPError`."""
        headers = {"authorization": f"Bearer {key}"} | ({"if-match": etag} if etag else {})
        response = await self.http.request(method, path, json=body, headers=headers)
        if response.status_code not in expected:
            raise RequestFailed(f"{method} {path}: HTTP {response.status_code} {response.text[:200]}")
        return response

    async def chat(
        self, model: str, key: str, *, expected: tuple[int, ...] = (200,), **fields: Any
    ) -> httpx.Response:
        """Ask a question, greedily and for a short answer unless `fields` say otherwise. Raises as `send`."""
        messages = [{"role": "user", "content": QUESTION}]
        body = {"model": model, "messages": messages, "max_tokens": 32, "temperature": 0, **fields}
        return await self.send("POST", "/v1/chat/completions", key, body, expected=expected)

    def curl(self, response: httpx.Response, option: str = "-sS") -> str:
        """The command that repeats a request of the first tenant's keys or of the operator, with their variables."""
        request, variable = response.request, "OPERATOR_KEY"
        for name, key in (
            ("KEY", self.access.tenants[0].api_key),
            ("ADMIN_KEY", self.access.tenants[0].admin_key),
        ):
            variable = name if request.headers["authorization"].endswith(key) else variable
        body = (
            f" -H 'Content-Type: application/json' -d {shlex.quote(request.content.decode())}"
            if request.content
            else ""
        )
        return f'curl {option} {shlex.quote(str(request.url))} -H "Authorization: Bearer ${variable}"{body}'
