"""An alias moves while streams run: each ends on the version it began with, and its text is that version's own."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from tests.end_to_end.live_server import LiveServer

from loraplex.adapters.push import PushRequest
from loraplex.platform.cli.command_context import open_tenant_command
from loraplex.platform.cli.local_push import local_push
from loraplex.platform.demo.tenants import ADAPTERS_FOLDER as BUNDLED

NAME = "swap"
VERSIONS = {1: "pirate", 2: "support"}
QUESTIONS = ("What is a black hole?", "Why is the sky blue?")
TOKENS = 20
MOVES = 20
MANY_MOVES = 50
"""With `--long`."""
STREAMS = 16
CLEANUP_S = 60.0


@dataclass(frozen=True)
class Answered:
    """What a client sees of one stream: `adapter` and `digest` from its headers."""

    question: str
    adapter: str
    digest: str
    text: str


class Client:
    """Speaks to the live server with one tenant's two keys."""

    def __init__(self, demo: LiveServer) -> None:
        tenant = demo.access.tenants[0]
        self.tenant = tenant.name
        limits = httpx.Limits(max_connections=STREAMS + 4)
        self._http = httpx.AsyncClient(base_url=demo.url, timeout=300, limits=limits)
        self._user = {"authorization": f"Bearer {tenant.api_key}"}
        self._admin = {"authorization": f"Bearer {tenant.admin_key}"}

    async def manage(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        url, given = f"/tenant/v1/adapters/{path}", {**self._admin, **(headers or {})}
        return await self._http.request(method, url, json=body, headers=given)

    async def stream(
        self, model: str, question: str, first_text: Callable[[], None] = lambda: None
    ) -> Answered:
        """Asserts that the answer is whole."""
        messages = [{"role": "user", "content": question}]
        body: dict[str, Any] = {"model": model, "messages": messages, "stream": True}
        body |= {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
        text, lines = "", []
        async with self._http.stream("POST", "/v1/chat/completions", json=body, headers=self._user) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line:
                    lines.append(line.removeprefix("data: "))
                    first_text()
        assert lines[-1] == "[DONE]", lines[-1]
        for line in lines[:-1]:
            text += "".join(choice["delta"].get("content") or "" for choice in json.loads(line)["choices"])
        adapter, digest = (answer.headers[f"x-loraplex-adapter{part}"] for part in ("", "-digest"))
        return Answered(question, adapter, digest, text)

    async def move(self, version: int, seen: str | None) -> str:
        """Moves `production` from the ETag `seen`, or makes it: its new ETag."""
        headers = {"if-none-match": "*"} if seen is None else {"if-match": seen}
        answer = await self.manage("PUT", f"{NAME}/aliases/production", {"version": version}, headers)
        assert answer.status_code == (201 if seen is None else 200), answer.text
        return answer.headers["etag"]

    async def remove(self) -> None:
        """Deletes the adapter once its last request has been settled."""
        deadline = time.monotonic() + CLEANUP_S
        await self.manage("DELETE", f"{NAME}/aliases/production")
        while (answer := await self.manage("DELETE", NAME)).status_code == 409:
            assert time.monotonic() < deadline, answer.text
            await asyncio.sleep(0.05)
        assert answer.status_code == 204, answer.text
        await self._http.aclose()


async def push_versions(demo: LiveServer, tenant: str) -> dict[int, str]:
    """Both versions of the adapter, validated and probed by the running server: their digests."""
    async with open_tenant_command(tenant, demo.data_dir) as command:
        local = await local_push(command, None)
        pushed = [
            await local.push(
                command.tenant_id, PushRequest(name=NAME, folder=BUNDLED / voice, promote="never")
            )
            for voice in VERSIONS.values()
        ]
    return {each.version: each.digest or "" for each in pushed}


class RunningStreams:
    """`STREAMS` streams that run at every moment: each that ends is followed by another at once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._asking: list[asyncio.Task[None]] = []
        self._ended = False
        self.answers: list[Answered] = []
        self.begun = 0

    async def start(self) -> None:
        """One after the other, so that they do not end together either."""
        for question, _ in zip(itertools.cycle(QUESTIONS), range(STREAMS)):
            first_text = asyncio.Event()
            self._asking.append(asyncio.create_task(self._keep_asking(question, first_text.set)))
            await first_text.wait()

    @property
    def running(self) -> int:
        """Number of streams that were requested and have not ended."""
        return self.begun - len(self.answers)

    async def further(self, count: int) -> None:
        """Wait until this many more have begun."""
        begun = self.begun + count
        while self.begun < begun:
            for task in self._asking:
                if task.done():
                    task.result()
            await asyncio.sleep(0.005)

    async def end(self) -> list[Answered]:
        self._ended = True
        await asyncio.gather(*self._asking)
        return self.answers

    async def _keep_asking(self, question: str, first_text: Callable[[], None]) -> None:
        while not self._ended:
            self.begun += 1
            self.answers.append(await self._client.stream(NAME, question, first_text))


async def swap_under_load(client: Client, moves: int) -> list[Answered]:
    """Moves the alias to and fro under streams that run, at every third move under one more that began since: on one version
    as often as on the other.
    """
    etag = await client.move(1, None)
    streams = RunningStreams(client)
    await streams.start()
    for number in range(moves):
        assert streams.running == STREAMS
        etag = await client.move(2 - number % 2, etag)
        assert streams.running == STREAMS
        if number % 3 == 2:
            await streams.further(1)
    assert etag == f'"{moves + 1}"'
    return await streams.end()


def test_an_alias_moves_under_load(
    demo: LiveServer, quantization: str, request: pytest.FixtureRequest
) -> None:
    moves = MANY_MOVES if request.config.getoption("--long") else MOVES

    async def scenario() -> None:
        client = Client(demo)
        digests = await push_versions(demo, client.tenant)
        try:
            solo = {
                (version, question): await client.stream(f"{NAME}@{version}", question)
                for version in VERSIONS
                for question in QUESTIONS
            }
            answers = await swap_under_load(client, moves)
        finally:
            await client.remove()
        assert len(answers) >= STREAMS + moves // 3
        assert {answer.digest for answer in answers} == set(digests.values())
        for answer in answers:
            version = int(answer.adapter.removeprefix(f"{NAME}@"))
            assert answer.digest == digests[version]
            if quantization == "none":
                assert answer == solo[version, answer.question]

    asyncio.run(scenario())
