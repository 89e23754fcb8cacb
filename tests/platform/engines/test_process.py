"""A real child process with the scripted engine: crash, hang, freeze, orphan, crash loop, stop."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from msgspec.structs import replace

from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import AdapterQuarantined, EngineUnavailable
from loraplex.engine.fake_engine import CRASH_STATUS, FakeScript, Fault
from loraplex.engine.messages import AdapterRef, EngineRequest, Event, Failed, Finished
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.engines.poison_memory import PoisonMemory
from loraplex.platform.engines.process import EngineProcess, EngineProcessOptions, WatchdogConfig
from loraplex.platform.processes.restart_budget import RestartPolicy
from loraplex.platform.startup_errors import EngineStartFailed


def request(request_id: str, max_tokens: int = 5) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens)
    return EngineRequest(request_id=request_id, namespace=b"n" * 32, prompt_token_ids=[1], sampling=sampling)


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def collect(engine: EngineProcess, engine_request: EngineRequest) -> list[Event]:
    return [event async for event in engine.client.submit(engine_request)]


async def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.02)


SILENCE_S = 3.0
"""A loading process reports each second at most, so less would end one that computes."""


def options(folder: Path, script: FakeScript, **changes: object) -> EngineProcessOptions:
    values: dict[str, object] = {
        "address": f"ipc://{folder}/run/e.sock",
        "config": EngineConfig(model="fake"),
        "fake": script,
        "restart": RestartPolicy(first_delay_s=0.01),
        **changes,
    }
    return EngineProcessOptions(**values)  # type: ignore[arg-type]


@asynccontextmanager
async def running(chosen: EngineProcessOptions) -> AsyncIterator[EngineProcess]:
    engine = EngineProcess(chosen)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def test_serves_and_stops_without_leftovers(tmp_path: Path) -> None:
    async with running(options(tmp_path, FakeScript())) as engine:
        pid = engine.pid
        assert pid is not None
        assert isinstance((await collect(engine, request("a")))[-1], Finished)
        assert (await engine.client.stats()).generation_tokens == 5
        assert engine.client.info().model_path == "fake"
        command_line = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        assert command_line[1:-1] == ["-P", "-m", "loraplex.platform.engines.main"]
    assert not lives(pid)
    assert not (tmp_path / "run" / "e.sock").exists()


async def test_a_killed_engine_fails_its_requests_and_comes_back(tmp_path: Path) -> None:
    async with running(options(tmp_path, FakeScript(token_interval_s=0.01))) as engine:
        task = asyncio.create_task(collect(engine, request("a", 3000)))
        await asyncio.sleep(0.2)
        first = engine.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        last = (await asyncio.wait_for(task, 60))[-1]
        assert isinstance(last, Failed) and last.code == "engine_lost"
        await until(lambda: engine.client.connected)
        assert engine.pid != first
        assert isinstance((await collect(engine, request("b")))[-1], Finished)
        assert (engine.client.restarts, engine.client.deaths, (await engine.client.stats()).running) == (
            1,
            1,
            0,
        )


@pytest.mark.parametrize(
    ("kind", "limits"),
    [
        ("crash", WatchdogConfig()),
        ("hang", WatchdogConfig(hang_s=0.5)),
        ("freeze", WatchdogConfig(unresponsive_s=2.0)),
    ],
)
async def test_faults_are_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, limits: WatchdogConfig
) -> None:
    script = FakeScript(faults=(Fault(kind=kind, request_id="bad", after_tokens=2),))  # type: ignore[arg-type]
    async with running(options(tmp_path, script, watchdog=limits)) as engine:
        last = (await asyncio.wait_for(collect(engine, request("bad")), 60))[-1]
        assert isinstance(last, Failed) and last.code == "engine_lost"
        # A healthy engine of a busy machine would not keep bounds as tight as these.
        monkeypatch.setattr(engine, "_options", options(tmp_path, script))
        await until(lambda: engine.client.connected)
        assert isinstance((await collect(engine, request("good")))[-1], Finished)


CRASHING = FakeScript(faults=(Fault(kind="crash", request_id="bad"),))


async def crash(engine: EngineProcess) -> None:
    deaths = engine.client.deaths
    last = (await collect(engine, request("bad")))[-1]
    assert isinstance(last, Failed) and last.code == "engine_lost"
    assert str(CRASH_STATUS) in str(engine.client.failure)
    await until(lambda: engine.client.deaths > deaths or engine.crash_loop.is_set())


@pytest.mark.long
async def test_supervision_goes_on_after_any_number_of_deaths(tmp_path: Path) -> None:
    policy = RestartPolicy(first_delay_s=0.01, max_delay_s=0.02)
    async with running(options(tmp_path, CRASHING, restart=policy)) as engine:
        for _ in range(10):
            await crash(engine)
        assert isinstance((await collect(engine, request("good")))[-1], Finished)
        await until(
            lambda: (engine.client.restarts, engine.client.deaths, engine.client.failure) == (10, 10, None)
        )


async def test_a_crash_loop_ends_where_the_policy_has_a_bound(tmp_path: Path) -> None:
    policy = RestartPolicy(first_delay_s=0.01, max_restarts=1)
    async with running(options(tmp_path, CRASHING, restart=policy)) as engine:
        for _ in range(2):
            await crash(engine)
        async with asyncio.timeout(60):
            await engine.crash_loop.wait()
        assert f"status {CRASH_STATUS}" in str(engine.client.failure)
        assert engine.pid is None
        with pytest.raises(EngineUnavailable):
            await engine.client.stats()


def with_adapter(request_id: str, tenant: bytes) -> EngineRequest:
    """A request with the only adapter of a tenant, a letter."""
    adapter = AdapterRef(namespace=tenant * 32, digest="d" * 64, blob_path="/b")
    return replace(request(request_id, 3000), namespace=tenant * 32, adapter=adapter)


@asynccontextmanager
async def remembered(chosen: EngineProcessOptions) -> AsyncIterator[tuple[EngineProcess, PoisonMemory]]:
    memory = PoisonMemory()
    engine = EngineProcess(chosen, on_death=memory.record_death)
    await engine.start()
    try:
        yield engine, memory
    finally:
        await engine.stop()


async def all_lost(engine: EngineProcess, *requests: EngineRequest) -> None:
    """Submit requests of which one kills the engine, and wait for the next engine."""
    deaths = engine.client.deaths
    for events in await asyncio.gather(*(collect(engine, each) for each in requests)):
        assert isinstance(events[-1], Failed) and events[-1].code == "engine_lost"
    await engine.client.wait_ready()
    assert engine.client.deaths == deaths + 1


async def test_an_adapter_that_kills_two_engines_is_refused(tmp_path: Path) -> None:
    async with remembered(options(tmp_path, FakeScript(faults=(Fault(kind="crash"),)))) as (engine, memory):
        for request_id in ("first", "second"):
            memory.check(with_adapter(request_id, b"n"), None)
            await all_lost(engine, with_adapter(request_id, b"n"))
        with pytest.raises(AdapterQuarantined):
            memory.check(with_adapter("third", b"n"), None)


async def test_a_request_that_kills_two_engines_costs_no_other_tenant_its_adapter(tmp_path: Path) -> None:
    """`open` is submitted once more beside it; `stream` had begun, so that its client asks again."""
    script = FakeScript(
        token_interval_s=0.01, faults=(Fault(kind="crash", request_id="bad", after_tokens=10),)
    )
    bad, innocent = with_adapter("bad", b"a"), with_adapter("open", b"b")
    async with remembered(options(tmp_path, script)) as (engine, memory):
        for stream in ("stream", "next stream"):
            await all_lost(engine, bad, innocent, with_adapter(stream, b"c"))
        for tenant in (b"a", b"b", b"c"):
            memory.check(with_adapter("later", tenant), None)


async def test_no_error_of_a_start_ends_the_supervision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(options(tmp_path, CRASHING)) as engine:
        start, failures = engine._spawn_until_ready, [ValueError("a line too long"), OSError("no memory")]

        async def fail_first() -> None:
            if failures:
                raise failures.pop()
            await start()

        monkeypatch.setattr(engine, "_spawn_until_ready", fail_first)
        last = (await collect(engine, request("bad")))[-1]
        assert isinstance(last, Failed) and last.code == "engine_lost"
        await until(lambda: (engine.client.restarts, engine.client.failure) == (3, None))
        assert isinstance((await collect(engine, request("good")))[-1], Finished)


async def test_a_loop_that_stood_still_kills_no_healthy_engine(tmp_path: Path) -> None:
    limits = WatchdogConfig(unresponsive_s=2.0)
    async with running(options(tmp_path, FakeScript(), watchdog=limits)) as engine:
        pid = engine.pid
        await asyncio.sleep(0.5)
        time.sleep(3.0)  # noqa: ASYNC251 - the event loop stands still, as it does while its process is stopped
        await asyncio.sleep(1.0)
        assert (engine.pid, engine.client.restarts) == (pid, 0)
        assert isinstance((await collect(engine, request("a")))[-1], Finished)


async def test_a_failed_start_names_the_reason_and_leaves_nothing(tmp_path: Path) -> None:
    broken = options(tmp_path, FakeScript(), fake=None, config=EngineConfig(model=str(tmp_path / "no-model")))
    engine = EngineProcess(broken)
    with pytest.raises(EngineStartFailed):
        await engine.start()
    assert engine.pid is None


def test_an_engine_that_is_killed_before_it_knows_what_to_load_is_a_failed_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the gateway's event loop, which refuses writes to a process that has ended."""
    spawn = asyncio.create_subprocess_exec

    async def spawn_and_kill(*command: str, **settings: Any) -> Process:
        process = await spawn(*command, **settings)
        process.kill()
        await process.wait()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn_and_kill)
    engine = EngineProcess(options(tmp_path, FakeScript()))
    with pytest.raises(EngineStartFailed, match="ended with status -9"):
        uvloop.run(engine.start())
    assert engine.pid is None


async def test_a_start_that_hangs_ends_by_the_name_of_its_stage(tmp_path: Path) -> None:
    engine = EngineProcess(options(tmp_path, FakeScript(), start_timeout_s=0.01))
    with pytest.raises(EngineStartFailed, match=r"not ready within 0\.01 s; it stopped at: starting Python"):
        await engine.start()
    assert engine.pid is None


async def test_a_start_that_is_silent_ends_long_before_its_limit(tmp_path: Path) -> None:
    chosen = options(tmp_path, FakeScript(), start_silence_s=0.01)
    with pytest.raises(
        EngineStartFailed, match=r"nor read anything for 0\.01 s; it stopped at: starting Python"
    ):
        await EngineProcess(chosen).start()


async def test_a_load_that_computes_may_take_longer_than_the_silence_allowed(tmp_path: Path) -> None:
    chosen = options(tmp_path, FakeScript(load_s=3 * SILENCE_S), start_silence_s=SILENCE_S)
    began = time.monotonic()
    async with running(chosen) as engine:
        assert time.monotonic() - began > 3 * SILENCE_S
        assert isinstance((await collect(engine, request("a")))[-1], Finished)


async def test_a_load_that_only_waits_is_killed(tmp_path: Path) -> None:
    script = FakeScript(load_s=60.0, loads_busily=False)
    engine = EngineProcess(options(tmp_path, script, start_silence_s=SILENCE_S))
    starting = asyncio.create_task(engine.start())
    await asyncio.wait_for(engine.described.wait(), 30)
    with pytest.raises(EngineStartFailed, match="neither computed nor read anything for 3 s"):
        await starting
    assert engine.pid is None


async def test_a_restart_that_hangs_is_killed_and_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn, spawned = asyncio.create_subprocess_exec, list[Process]()

    async def spawn_and_freeze_the_second(*command: str, **settings: Any) -> Process:
        spawned.append(process := await spawn(*command, **settings))
        if len(spawned) == 2:
            process.send_signal(signal.SIGSTOP)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn_and_freeze_the_second)
    async with running(options(tmp_path, FakeScript(), start_silence_s=5.0)) as engine:
        spawned[0].kill()
        await until(lambda: len(spawned) == 3 and engine.client.connected)
        assert spawned[1].returncode == -signal.SIGKILL
        assert isinstance((await collect(engine, request("a")))[-1], Finished)


async def test_stop_lets_the_child_drain(tmp_path: Path) -> None:
    async with running(options(tmp_path, FakeScript(token_interval_s=0.02))) as engine:
        task = asyncio.create_task(collect(engine, request("a", 20)))
        await asyncio.sleep(0.1)
        await engine.client.drain()
        assert isinstance((await task)[-1], Finished)
        (refused,) = await collect(engine, request("late"))
        assert isinstance(refused, Failed) and refused.code == "server_shutting_down"


PARENT = """
import asyncio, sys
from pathlib import Path
from loraplex.engine.config import EngineConfig
from loraplex.engine.fake_engine import FakeScript
from loraplex.platform.engines.process import EngineProcess, EngineProcessOptions
async def main():
    options = EngineProcessOptions(
        address=f"ipc://{sys.argv[1]}/run/e.sock", config=EngineConfig(model="fake"), fake=FakeScript()
    )
    engine = EngineProcess(options)
    await engine.start()
    print(engine.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_the_child_dies_with_a_killed_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert lives(child)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while lives(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not lives(child)
