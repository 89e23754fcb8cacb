"""Starts of one and of several engines; sockets of dead servers are removed, and a deep data directory gets short ones elsewhere."""

import os
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import psutil
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs
from tests.platform.engines.engine_socket import until

from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import AdapterQuarantined, EngineUnavailable
from loraplex.engine.fake_engine import FakeScript, Fault
from loraplex.engine.messages import AdapterRef, EngineRequest, Failed, Finished
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.config import Settings, load_settings
from loraplex.platform.engines import engine_places, wire
from loraplex.platform.engines.engine_config import engine_config
from loraplex.platform.engines.engine_places import EnginePlace
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.engines.process import MODULE, EngineProcess, EngineProcessOptions
from loraplex.platform.engines.startup import own_address, socket_folder, start_engines
from loraplex.platform.engines.supervised_engines import SupervisedEngines
from loraplex.platform.errors import EngineNotAdded


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


async def test_stale_sockets_go_and_live_ones_stay(tmp_path: Path) -> None:
    ended = ended_process()
    run = tmp_path / "run"
    run.mkdir()
    stale, live = run / f"engine.{ended}.0.sock", run / f"engine.{os.getppid()}.1.sock"
    for file in (stale, live, run / "other"):
        file.touch()
    async with AsyncExitStack() as stack:
        address = own_address(socket_folder(tmp_path, stack))
    assert wire.socket_path(address).parent == run
    assert sorted(file.name for file in run.iterdir()) == sorted([live.name, "other"])


async def test_a_deep_data_directory(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        path = wire.socket_path(own_address(socket_folder(tmp_path / ("deep" * 30), stack)))
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not path.parent.exists()


async def test_deaths_of_the_opened_engine_reach_the_memory_of_its_pool(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_bytes(msgspec.json.encode(FakeScript(faults=(Fault(kind="crash"),))))
    settings = load_settings({"data_dir": tmp_path / "data", "fake_engine": script})
    adapter = AdapterRef(namespace=bytes(32), digest="d" * 64, blob_path="/b")
    sampling = SamplingParams(max_tokens=1)
    request = EngineRequest(
        request_id="r", namespace=bytes(32), prompt_token_ids=[1], sampling=sampling, adapter=adapter
    )
    async with AsyncExitStack() as stack:
        engines = start_engines(settings, "fake", stack, lambda stage: None)
        await engines.described()
        pool = engines.pool
        assert pool.info().model_path == "fake" and not pool.engines[0].connected
        await engines.ready
        for request_id in ("first", "second"):
            pool.poison_memory.check(request, None)
            poison = replace(request, request_id=request_id)
            assert [type(event) async for event in pool.submit(poison)] == [Failed]
            await pool.wait_ready()
        with pytest.raises(AdapterQuarantined):
            pool.poison_memory.check(request, None)


def scripted(tmp_path: Path, script: FakeScript, **settings: object) -> Settings:
    file = tmp_path / "script.json"
    file.write_bytes(msgspec.json.encode(script))
    return load_settings({"data_dir": tmp_path / "data", "fake_engine": file, "device": "cpu", **settings})


async def finished(pool: EnginePool, request_id: str) -> bool:
    request = EngineRequest(
        request_id=request_id,
        namespace=request_id.encode().ljust(32),
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=2),
    )
    return isinstance([event async for event in pool.submit(request)][-1], Finished)


async def test_several_engines_have_a_socket_and_cores_of_their_own_and_restart_each_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = [(each,) for each in sorted(os.sched_getaffinity(0))]
    monkeypatch.setattr(engine_places, "physical_cores", lambda: cores)
    async with AsyncExitStack() as stack:
        stages: list[str] = []
        settings = scripted(tmp_path, FakeScript(), engines=2)
        starting = start_engines(settings, "fake", stack, stages.append)
        await starting.ready
        pool = starting.pool
        await until(lambda: all(engine.connected for engine in pool.engines.values()))
        assert sorted(pool.engines) == [0, 1] and all([await finished(pool, f"r{n}") for n in range(8)])
        children = {child.pid: child for child in psutil.Process().children() if MODULE in child.cmdline()}
        affinities = [set(child.cpu_affinity()) for child in children.values()]
        expected = {0, 1} if len(cores) == 2 else set().union(*affinities)
        assert len(affinities) == 2 and set().union(*affinities) == expected
        assert len(cores) == 1 or not affinities[0] & affinities[1]
        places = {child.environ()["OMP_PLACES"] for child in children.values()}
        assert places == {engine_places.core_places(2, cores)[n].environment["OMP_PLACES"] for n in (0, 1)}
        next(iter(children.values())).kill()
        await until(lambda: sum(engine.restarts for engine in pool.engines.values()) == 1)
        assert all([await finished(pool, f"s{n}") for n in range(8)])
        await until(lambda: all(engine.connected for engine in pool.engines.values()))
        assert sum(engine.deaths for engine in pool.engines.values()) == 1
    assert not list((tmp_path / "data" / "run").iterdir())


async def test_an_engine_that_does_not_start_leaves_the_others_and_the_last_one_ends_the_start(
    tmp_path: Path,
) -> None:
    pool, options = EnginePool(), {"config": EngineConfig(model="fake"), "fake": FakeScript()}

    def make(number: int, place: EnginePlace) -> EngineProcess:
        address = f"ipc://{tmp_path}/run{number}/e.sock"
        if number in broken:
            (tmp_path / f"run{number}").write_text("no folder")
        return EngineProcess(EngineProcessOptions(address=address, place=place, **options))  # type: ignore[arg-type]

    broken = {0}
    engines = SupervisedEngines(pool, [EnginePlace()] * 2, make)
    try:
        with capture_logs() as logs:
            await engines.start(2)
        assert [line["engine"] for line in logs if line["event"] == "engine did not start"] == [0]
        assert list(pool.engines) == [1] and await finished(pool, "r")
    finally:
        await engines.stop()
    broken = {2, 3}
    engines = SupervisedEngines(pool, [EnginePlace()] * 2, make)
    with pytest.raises(OSError):
        await engines.start(2)


def test_the_engines_of_a_host_share_its_memory_for_adapters() -> None:
    settings = load_settings({"adapter_host_bytes": 8 << 30})
    assert [engine_config(settings, "m", engines).lora.host_max_bytes >> 30 for engines in (1, 4)] == [8, 2]


async def test_an_engine_is_added_and_drained_while_the_others_serve(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        settings = scripted(tmp_path, FakeScript(token_interval_s=0.01), engines=2)
        starting = start_engines(settings, "fake", stack, lambda stage: None)
        await starting.ready
        pool, fleet = starting.pool, starting.pool.fleet
        assert fleet is not None
        await until(lambda: all(engine.connected for engine in pool.engines.values()))
        device = pool.engines[0].device
        assert await fleet.add(None, replaces=0) == 2 and pool.engines[2].device == device
        await until(lambda: pool.engines[2].connected)
        await fleet.drain(0, 60.0)
        await fleet.drain(0, 60.0)
        assert all([await finished(pool, f"r{n}") for n in range(8)])
        await until(lambda: sorted(pool.engines) == [1, 2])
        # One that does not run any more, or not yet, is ended at once.
        number = await fleet.add(None, None)
        await fleet.drain(number, 60.0)
        await until(lambda: sorted(pool.engines) == [1, 2])
        with pytest.raises(EngineUnavailable):
            await fleet.drain(0, 1.0)
        with pytest.raises(EngineNotAdded, match="starts its engines itself"):
            await fleet.add("ipc:///a", None)
        assert [engine.deaths for engine in pool.engines.values()] == [0, 0]


async def test_each_gpu_has_one_engine(tmp_path: Path) -> None:
    pool = EnginePool()

    def make(number: int, place: EnginePlace) -> EngineProcess:
        return EngineProcess(
            EngineProcessOptions(
                address=f"ipc://{tmp_path}/run/{number}.sock",
                config=EngineConfig(model="fake"),
                fake=FakeScript(),
                place=place,
            )
        )

    fleet = SupervisedEngines(pool, [EnginePlace(gpu="0"), EnginePlace(gpu="1")], make)
    try:
        await fleet.start(1)
        assert pool.engines[await fleet.add(None, None)].device == "GPU 1"
        with pytest.raises(EngineNotAdded, match="each visible GPU has an engine"):
            await fleet.add(None, replaces=0)
    finally:
        await fleet.stop()
