"""Deaths and endings of real processes: engine, gateway and serve killed with -9, a restart on the same data, a drain."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, OpenAI
from tests.end_to_end.live_server import LiveServer, descendants, engine_stats, lives, serving, until
from tests.end_to_end.test_client import ask, user_of


class Stream(threading.Thread):
    """Reads one long streamed response to its end; `chunks` counts the received chunks."""

    def __init__(self, client: OpenAI, model: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._options: dict[str, Any] = {"max_tokens": max_tokens, "extra_body": {"ignore_eos": True}}
        self._client, self._model = client, model
        self.chunks = 0
        self.reason: str | None = None
        self.error: Exception | None = None
        self.ended = 0.0
        self.start()

    def run(self) -> None:
        try:
            for chunk in ask(self._client, self._model, stream=True, **self._options):
                self.chunks += 1
                for choice in chunk.choices:
                    self.reason = choice.finish_reason or self.reason
        except Exception as error:  # noqa: BLE001 - whatever it is, the test asserts on it
            self.error = error
        self.ended = time.monotonic()

    def flows(self) -> bool:
        return self.chunks >= 3


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def survivor(demo_model: Path, data_dir: Path) -> Iterator[LiveServer]:
    """A demo that loses its engine and then its life."""
    with serving(data_dir, demo_model, "--port", "0") as server:
        yield server


@pytest.mark.long
def test_a_killed_engine_fails_streams_fast_and_returns(survivor: LiveServer) -> None:
    client, name = user_of(survivor, "pirate")
    before = ask(client, name).choices[0].message.content
    stream = Stream(client, name, 2000)
    until(stream.flows, 120, "the stream flows")
    killed = survivor.engine_pid
    at = time.monotonic()
    os.kill(killed, signal.SIGKILL)
    stream.join(300)
    assert stream.ended - at < 20
    assert isinstance(stream.error, APIError), stream.error
    until(lambda: not survivor.ready(), 120, "readyz tells that the engine is lost")
    until(survivor.ready, 120, "the engine is back")
    assert survivor.engine_pid != killed
    assert ask(client, name).choices[0].message.content == before


def test_a_killed_serve_leaves_no_process(survivor: LiveServer) -> None:
    below = descendants(survivor.process.pid)
    assert len(below) >= 3  # engine, PostgreSQL, Valkey
    client, name = user_of(survivor, "base")
    stream = Stream(client, name, 2000)
    until(stream.flows, 120, "the stream flows")
    survivor.process.kill()
    survivor.process.wait()
    until(lambda: not any(map(lives, below)), 120, "no process is left")
    stream.join(300)
    assert stream.error is not None


def test_a_restart_keeps_keys_and_sigterm_drains(
    survivor: LiveServer, demo_model: Path, data_dir: Path
) -> None:
    """On the data directory of the killed one."""
    assert not lives(survivor.process.pid)
    keys = [tenant.api_key for tenant in survivor.access.tenants]
    with serving(data_dir, demo_model, "--port", "0") as server:
        assert [tenant.api_key for tenant in server.access.tenants] == keys
        client, name = user_of(server, "support")
        stream = Stream(client, name, 60)
        until(stream.flows, 120, "the stream flows")
        server.stop()
        stream.join(300)
        assert (stream.error, stream.reason) == (None, "length")


def test_one_of_two_gateways_dies(
    demo_model: Path, tmp_path: Path, database_url: str, valkey_url: str
) -> None:
    """Its rows are aborted in the engine that both share; the other's stream and requests go on."""
    address = f"ipc://{tmp_path}/run/shared.sock"
    stores = {"database_url": database_url, "redis_url": valkey_url}
    arguments = ("--role", "gateway", "--engine", address, "--port", "0")
    with serving(tmp_path, demo_model, "--role", "engine", "--engine", address) as engine:
        named = (*arguments, "--served-model-name", "demo")
        with (
            serving(tmp_path, demo_model, *named, settings=stores) as one,
            serving(tmp_path, demo_model, *named, settings=stores) as two,
        ):
            check_gateways(one, two, address)
            one.stop()
        engine.stop()


def check_gateways(one: LiveServer, two: LiveServer, address: str) -> None:
    def running() -> int:
        return asyncio.run(engine_stats(address)).running

    kept = Stream(one.client(0), "pirate", 150)
    lost = [Stream(two.client(tenant), name, 4000) for name, tenant in two.owners().items()]
    until(lambda: all(stream.flows() for stream in (kept, *lost)), 120, "all streams flow")
    assert running() == 1 + len(lost)
    two.process.kill()
    two.process.wait()
    until(lambda: running() <= 1, 120, "the rows of the killed gateway are aborted")
    kept.join(300)
    assert (kept.error, kept.reason) == (None, "length")
    assert ask(one.client(1), "records", max_tokens=4).usage.completion_tokens == 4
    until(lambda: running() == 0, 120, "nothing runs")
    final = asyncio.run(engine_stats(address))
    assert final.referenced_blocks == final.pinned_adapters == final.waiting == 0
