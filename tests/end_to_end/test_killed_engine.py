"""kill -9 of an engine under 32 streams: none fails, seeded texts are those of an undisturbed run, and each token is billed once."""

import asyncio
import json
import os
import signal
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from tests.end_to_end.billed_load import all_shipped, query
from tests.end_to_end.live_server import LiveServer, command_line, descendants, serving, until
from tests.end_to_end.lost_stores import MODEL, check_drift, ready, scripted
from tests.platform.server.serve_process import Serve, make_key, stores
from tests.platform.server.serve_process import serving as serving_script

from loraplex.engine.fake_engine import Fault
from loraplex.platform.datastores.embedded.lock import OwnerLock
from loraplex.platform.datastores.embedded.servers import SERVICES_FOLDER

__all__ = ["stores"]

STREAMS: Final = 32
TOKENS: Final = 40
BEFORE_KILL: Final = STREAMS * 5
"""Deltas that have arrived when the engine is killed: no stream has ended, and most have begun."""
SCHEMA: Final = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "people": {"type": "integer", "maximum": 10**8},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}
FORMAT: Final = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
ROWS: Final = "SELECT client_request_id, outcome, completion_tokens FROM usage_records"


@dataclass
class Stream:
    """What a client has of one stream."""

    text: str = ""
    deltas: int = 0
    longest_gap_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    error: object = None
    finish_reason: str | None = None
    done: bool = False


def bodies(model: str, adapters: list[str], run: str) -> dict[str, dict[str, Any]]:
    """By request id: base and adapters, half of them with a schema, and half of each half with a seed."""
    made = {}
    for index in range(STREAMS):
        body: dict[str, Any] = {
            "model": [model, *adapters][index % (1 + len(adapters))],
            "messages": [{"role": "user", "content": f"Tell me about city number {index}."}],
            "max_tokens": TOKENS,
            "temperature": 1.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if index % 2:
            body |= {"response_format": FORMAT, "max_tokens": 2 * TOKENS}
        else:
            body["ignore_eos"] = True
        if index % 4 < 2:
            body["seed"] = index
        made[f"{run}-{index}"] = body
    return made


async def read(client: httpx.AsyncClient, name: str, body: dict[str, Any], stream: Stream) -> None:
    async with client.stream(
        "POST", "/v1/chat/completions", json=body, headers={"x-request-id": name}
    ) as response:
        last = time.monotonic()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                stream.done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                stream.error = event.get("error")
                stream.usage = event.get("usage") or stream.usage
                for choice in event.get("choices", ()):
                    stream.text += choice["delta"].get("content") or ""
                    stream.finish_reason = choice["finish_reason"] or stream.finish_reason
                    stream.deltas += 1
                    now = time.monotonic()
                    stream.longest_gap_s, last = max(stream.longest_gap_s, now - last), now


async def load(
    server: LiveServer, wanted: dict[str, dict[str, Any]], victim: int | None
) -> dict[str, Stream]:
    """Read all streams at once; `victim` is killed in the middle."""
    streams = {name: Stream() for name in wanted}
    headers = {"authorization": f"Bearer {server.access.tenants[0].api_key}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=300) as client:
        reading = [
            asyncio.create_task(read(client, name, body, streams[name])) for name, body in wanted.items()
        ]
        if victim is not None:
            async with asyncio.timeout(300):
                while sum(each.deltas for each in streams.values()) < BEFORE_KILL:
                    await asyncio.sleep(0.01)
            assert not any(each.done for each in streams.values())
            os.kill(victim, signal.SIGKILL)
        await asyncio.gather(*reading)
    return streams


def engine_pids(server: LiveServer) -> list[int]:
    return sorted(pid for pid in descendants(server.process.pid) if "engines.main" in command_line(pid))


def check(wanted: dict[str, dict[str, Any]], streams: dict[str, Stream]) -> None:
    assert all(each.done and each.error is None for each in streams.values()), streams
    for name, body in wanted.items():
        if streams[name].finish_reason == "length":
            assert streams[name].usage["completion_tokens"] == body["max_tokens"]
        else:
            assert json.loads(streams[name].text).keys() == {"city", "people"}
    assert any(each.finish_reason == "stop" for each in streams.values())


def check_ledger(server: LiveServer, streams: dict[str, Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    facts = OwnerLock(server.data_dir / SERVICES_FOLDER).facts()
    assert facts is not None
    until(lambda: all_shipped(facts.database_url), 120, "the ledger has all")
    rows = [(name, *rest) for name, *rest in query(facts.database_url, ROWS) if name in streams]
    assert len(rows) == len(streams)
    assert {name: tuple(rest) for name, *rest in rows} == {
        name: ("completed", each.usage["completion_tokens"]) for name, each in streams.items()
    }
    check_drift(facts, monkeypatch)


POISON: Final = 399
CRASHES: Final = scripted(
    token_interval_s=0.02, faults=(Fault(kind="crash", prompt_token=POISON, after_tokens=2),)
)


def complete(serve: Serve, key: str, prompt: list[int]) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 20, "ignore_eos": True}
    return httpx.post(
        f"{serve.url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=120
    )


def deaths(serve: Serve) -> float:
    lines = httpx.get(f"{serve.url}/metrics").text.splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("loraplex_engine_deaths_total{"))


def has_deaths(serve: Serve, count: float) -> bool:
    found = deaths(serve)
    assert found <= count
    return found == count


@pytest.mark.long
def test_a_poison_prompt_does_not_travel(tmp_path: Path, demo_model: Path, stores: dict[str, str]) -> None:
    """Two engines die of it, others of its tenant are served meanwhile, and after three deaths it reaches no engine."""
    arguments = ("--engines", "2", "--served-model-name", MODEL)
    with serving_script(tmp_path, demo_model, CRASHES, *arguments, settings=stores) as serve:
        key = make_key(stores["database_url"])
        until(lambda: ready(serve), 60, "readyz answers 200")
        for died in (2.0, 3.0, 3.0):
            refused = complete(serve, key, [5, POISON])
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
            assert refused.headers["x-should-retry"] == "false"
            assert complete(serve, key, [5, 6]).status_code == 200
            until(partial(has_deaths, serve, died), 30, "the metrics have the death")
        until(lambda: ready(serve), 60, "readyz answers 200")
        assert "is refused for" in complete(serve, key, [5, POISON]).text


@pytest.mark.long
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("engines", [1, 2])
def test_no_stream_fails(
    tmp_path: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch, engines: int, quantization: str
) -> None:
    options = ("--port", "0", "--dtype", "bfloat16", "--quantization", quantization)
    several = ("--engines", str(engines)) if engines > 1 else ()
    with serving(tmp_path, demo_model, *options, *several) as server:
        adapters = list(server.access.tenants[0].adapters)[:2]
        undisturbed = bodies(server.access.model, adapters, "undisturbed")
        expected = asyncio.run(load(server, undisturbed, None))
        check(undisturbed, expected)
        killed = bodies(server.access.model, adapters, "killed")
        pids = engine_pids(server)
        assert len(pids) == engines
        began = time.monotonic()
        streams = asyncio.run(load(server, killed, pids[0]))
        seconds = time.monotonic() - began
        check(killed, streams)
        seeded = [name for name, body in killed.items() if "seed" in body]
        same = sum(
            streams[name].text == expected[name.replace("killed", "undisturbed")].text for name in seeded
        )
        gap = max(each.longest_gap_s for each in streams.values())
        print(
            f"\n{engines} engines, {quantization}: {len(streams)} streams, 0 failed, {same} of {len(seeded)} seeded texts"
            f" as undisturbed, longest pause {gap:.1f} s, all in {seconds:.1f} s"
        )
        assert same == len(seeded)
        until(lambda: len(engine_pids(server)) == engines and server.ready(), 120, "the engine is back")
        check_ledger(server, expected | streams, monkeypatch)
        server.stop()
