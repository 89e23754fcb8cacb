"""A soak on the scripted engine: memory, file descriptors, tasks, threads and metric series of a busy server stay constant."""

import asyncio
import faulthandler
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import pytest
from tests.end_to_end.live_server import RUN, command_line, descendants
from tests.end_to_end.soak_load import SoakLoad

from loraplex.engine.fake_engine import DEFAULT_INFO, FakeScript
from loraplex.platform.bench.fixtures import open_fixtures, write_random_adapter
from loraplex.platform.bench.local_server import LocalServer, run_local_server

WORKERS = 12
SAMPLES = 120
# Pools, caches and allocator arenas fill in the first part of a run.
WARM_UP = 0.4
MIB = 1 << 20
MAX_GROWTH = {
    "gateway MiB": 16.0,
    "engine MiB": 16.0,
    "descriptors": 12.0,
    "tasks": 12.0,
    "threads": 4.0,
    "series": 0.0,
}
"""By which the fitted line may rise over the counted part of the run."""


@dataclass
class Samples:
    """Readings of one server by name, with the seconds at which they were taken."""

    at: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def growth(self, name: str) -> float:
        """How far the fitted line rises over the counted part."""
        first = int(WARM_UP * len(self.at))
        at, values = self.at[first:], self.values[name][first:]
        return statistics.linear_regression(at, values).slope * (at[-1] - at[0])

    def table(self) -> str:
        minutes = (self.at[-1] - self.at[int(WARM_UP * len(self.at))]) / 60
        return "\n".join(
            f"{name}: {values[0]:.1f} at the start, {values[-1]:.1f} at the end, "
            f"slope {self.growth(name) / minutes:+.3f} per minute over the last {minutes:.1f} minutes"
            for name, values in self.values.items()
        )


@pytest.mark.long
def test_a_long_run_leaks_nothing(
    tmp_path: Path, demo_model: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    faulthandler.cancel_dump_traceback_later()
    minutes = float(pytestconfig.getoption("--soak-minutes"))
    script = tmp_path / "script.json"
    info = msgspec.structs.replace(DEFAULT_INFO, vocab_size=49_152, eos_token_ids=[2])
    script.write_bytes(msgspec.json.encode(FakeScript(info=info, token_interval_s=0.005)))
    samples, load = asyncio.run(soak(demo_model, {"fake_engine": str(script)}, 60 * minutes))
    with capsys.disabled():
        print(f"\n{samples.table()}\n{dict(load.done)}")
    assert not load.faults, load.faults
    grown = {name: samples.growth(name) for name in MAX_GROWTH}
    assert all(grown[name] <= bound for name, bound in MAX_GROWTH.items()), samples.table()


async def soak(model: Path, settings: Mapping[str, str], seconds: float) -> tuple[Samples, SoakLoad]:
    async with run_local_server(str(model), settings) as server:
        async with open_fixtures(server) as fixtures:
            tenants = [await fixtures.tenant(name) for name in ("first", "second")]
            adapter = write_random_adapter(server.data_dir / "draft", fixtures.model_config(), 2, 0)
        keys = (tenants[0].api_key, tenants[1].api_key)
        load = SoakLoad(server.base_url, keys, admin_key(server, "first"), adapter)
        samples = Samples()
        sampling = asyncio.create_task(sample(server, samples, seconds / SAMPLES))
        await load.run(seconds, WORKERS)
        sampling.cancel()
        with suppress(asyncio.CancelledError):
            await sampling
    return samples, load


def admin_key(server: LocalServer, tenant: str) -> str:
    options = ("--tenant", tenant, "--scope", "tenant:admin", "--data-dir", str(server.data_dir), "--json")
    command = [sys.executable, "-c", RUN, "key", "create", *options]
    result = subprocess.run(command, capture_output=True, check=True)
    return str(msgspec.json.decode(result.stdout)["api_key"])


async def sample(server: LocalServer, samples: Samples, every_s: float) -> None:
    began = time.monotonic()
    async with httpx.AsyncClient(base_url=server.base_url, timeout=300) as client:
        while True:
            await asyncio.sleep(every_s)
            exposition = (await client.get("/metrics")).text
            readings = read_processes(server.pid)
            readings["tasks"] = metric(exposition, "loraplex_asyncio_tasks")
            readings["series"] = sum(not line.startswith("#") for line in exposition.splitlines())
            samples.at.append(time.monotonic() - began)
            for name, value in readings.items():
                samples.values[name].append(value)


def read_processes(gateway: int) -> dict[str, float]:
    """Resident memory of the gateway and its engine, and open descriptors and threads of both."""
    (engine,) = (pid for pid in descendants(gateway) if "engines.main" in command_line(pid))
    return {
        "gateway MiB": resident_bytes(gateway) / MIB,
        "engine MiB": resident_bytes(engine) / MIB,
        "descriptors": sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (gateway, engine)),
        "threads": sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in (gateway, engine)),
    }


def resident_bytes(pid: int) -> int:
    found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def metric(exposition: str, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", exposition, re.MULTILINE)
    assert found, name
    return float(found[1])
