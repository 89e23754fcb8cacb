"""A Ray cluster of one machine with replicas of the fake engine, in this process's network namespace.

Invariant: it must be the namespace of its own that `namespaced` makes, where only the loopback exists: Ray listens on all addresses.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil
import ray
from ray import serve

from loraplex.adapters.storage.local_store import ADAPTERS_FOLDER, LocalAdapterStore
from loraplex.engine.fake_engine import FakeScript
from loraplex.engine.messages import AdapterRef, EngineRequest, Event
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.engines.event_buffer import EventBufferConfig
from loraplex.platform.engines.poison_memory import Work
from loraplex.platform.ray.deployment import engine_deployment
from loraplex.platform.ray.engine import RayEngine
from loraplex.platform.ray.replica_directory import directory_of
from loraplex.platform.ray.replica_set import ReplicaSet
from loraplex.platform.ray.startup import open_handle
from loraplex.tenants.ids import uuid7

ENGINE_MODULE = "loraplex.platform.engines.main"
APP = "loraplex"
TENANT = uuid7()
NAMESPACE = b"n" * 32


@contextmanager
def cluster() -> Iterator[None]:
    """Start Ray and Serve without their HTTP servers, and end both."""
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    try:
        serve.start(proxy_location="Disabled")
        yield
        serve.shutdown()  # type: ignore[no-untyped-call]
    finally:
        ray.shutdown()


def deploy(
    folder: Path,
    script: FakeScript,
    replicas: int | Literal["auto"],
    settings: Mapping[str, Any] | None = None,
    *,
    app: str = APP,
    **options: Any,
) -> None:
    """Deploy the application and wait until it has `replicas`. Other settings than before are a rolling update."""
    file = folder / "script.json"
    file.write_bytes(msgspec.json.encode(script))
    given = {
        "model": "fake",
        "fake_engine": str(file),
        "data_dir": str(folder / "data"),
        "log_level": "warning",
        **(settings or {}),
    }
    scaled = engine_deployment(given).options(num_replicas=replicas, **options)
    serve.run(scaled.bind(given), name=app, route_prefix=None)


@dataclass(frozen=True)
class Gateway:
    """A client of the replicas as a gateway has it. `deaths`: the work of each reported death."""

    engine: RayEngine
    replicas: ReplicaSet
    deaths: list[list[Work]]
    folder: Path

    def adapter(self, number: int) -> AdapterRef:
        """A stored adapter, of which the fake engine reads nothing."""
        digest = f"{number:064x}"
        path = self.folder / "data" / ADAPTERS_FOLDER / str(TENANT) / digest
        path.mkdir(parents=True, exist_ok=True)
        return AdapterRef(namespace=NAMESPACE, digest=digest, blob_path=str(path))

    async def collect(self, engine_request: EngineRequest) -> list[Event]:
        return [event async for event in self.engine.submit(engine_request)]

    async def until_ready(self, count: int, timeout_s: float = 60.0) -> float:
        """Wait until `count` replicas take requests; returns the seconds that it took."""
        began = time.monotonic()
        async with asyncio.timeout(timeout_s):
            await self.replicas.wait_for(
                lambda: sum(view.connected for view in self.replicas.views.values()) == count
            )
        return time.monotonic() - began


@asynccontextmanager
async def gateway(folder: Path, app: str = APP) -> AsyncIterator[Gateway]:
    deaths: list[list[Work]] = []
    replicas = ReplicaSet(directory_of(app), lambda works: deaths.append(list(works)))
    storage = LocalAdapterStore(folder / "data" / ADAPTERS_FOLDER)
    engine = RayEngine(replicas, EventBufferConfig(), storage.tenant_of)
    engine.start()
    engine.connect(await asyncio.to_thread(open_handle, app))
    try:
        yield Gateway(engine, replicas, deaths, folder)
    finally:
        await engine.close()


def request(request_id: str, max_tokens: int = 16, **fields: Any) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens)
    return EngineRequest(
        **{
            "request_id": request_id,
            "namespace": NAMESPACE,
            "prompt_token_ids": [1, 2, 3],
            "sampling": sampling,
            **fields,
        }
    )


def engine_processes() -> Mapping[int, psutil.Process]:
    """The engine processes below this one, by the process id of their replica."""
    return {
        process.ppid(): process
        for process in psutil.Process().children(recursive=True)
        if ENGINE_MODULE in process.cmdline()
    }
