"""Sockets of dead servers are removed; a data directory too deep for a socket gets a short one elsewhere."""

import os
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from loraplex.engine.errors import AdapterQuarantined
from loraplex.engine.fake_engine import FakeScript, Fault
from loraplex.engine.messages import AdapterRef, EngineRequest, Failed
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.config import load_settings
from loraplex.platform.engines import wire
from loraplex.platform.engines.startup import own_address, start_engines


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


async def test_stale_sockets_go_and_live_ones_stay(tmp_path: Path) -> None:
    ended = ended_process()
    run = tmp_path / "run"
    run.mkdir()
    stale, live = run / f"engine.{ended}.sock", run / f"engine.{os.getppid()}.sock"
    for file in (stale, live, run / "other"):
        file.touch()
    async with AsyncExitStack() as stack:
        address = own_address(tmp_path, stack)
    assert wire.socket_path(address).parent == run
    assert sorted(file.name for file in run.iterdir()) == sorted([live.name, "other"])


async def test_a_deep_data_directory(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        path = wire.socket_path(own_address(tmp_path / ("deep" * 30), stack))
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
