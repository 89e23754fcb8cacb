"""Opens the engine replicas of a gateway: joins the Ray cluster as a driver, and follows the Serve application.

Invariant: the cluster is the one that Ray itself finds: `RAY_ADDRESS`, or the Ray node of this machine.
"""

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import Any, Final

import ray
import structlog
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from loraplex.adapters.storage.local_store import ADAPTERS_FOLDER, LocalAdapterStore
from loraplex.platform.config import Settings
from loraplex.platform.engines.event_buffer import DEFAULT_BUFFER
from loraplex.platform.engines.poison_memory import PoisonMemory
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.engines.startup import OnStage, StartingEngines
from loraplex.platform.ray.deployment import DEPLOYMENT
from loraplex.platform.ray.engine import RayEngine
from loraplex.platform.ray.replica_directory import directory_of
from loraplex.platform.ray.replica_set import ReplicaSet
from loraplex.platform.startup_errors import EngineStartFailed

SERVE_POLL_S: Final = 1.0


def start_ray_engine(
    settings: Settings, app_name: str, stack: AsyncExitStack, on_stage: OnStage
) -> StartingEngines:
    """Begin to join the cluster and to wait for a replica; `stack` leaves it. `ready` raises `EngineStartFailed`."""
    memory = PoisonMemory()
    replicas = ReplicaSet(directory_of(app_name), memory.record_death)
    storage = LocalAdapterStore(settings.data_dir / ADAPTERS_FOLDER)
    engine = RayEngine(replicas, DEFAULT_BUFFER, storage.tenant_of)
    engine.start()
    stack.push_async_callback(engine.close)
    ready = asyncio.create_task(_join(settings, app_name, engine, on_stage))
    stack.push_async_callback(_leave, ready)
    return StartingEngines(EnginePool([engine], memory, engine.observed), ready, asyncio.Event())


async def _join(settings: Settings, app_name: str, engine: RayEngine, on_stage: OnStage) -> None:
    on_stage(f"joining the Ray cluster, and waiting for the Serve application {app_name}")
    try:
        async with asyncio.timeout(settings.engine_start_timeout_s):
            await asyncio.to_thread(_connect)
            engine.connect(await _handle(app_name))
            await engine.wait_ready()
    except (ConnectionError, RayError) as error:
        raise EngineStartFailed(
            f"no Ray cluster: {error}; start a Ray node on this machine, or set RAY_ADDRESS"
        ) from None
    except TimeoutError:
        raise EngineStartFailed(f"no engine replica of the Serve application {app_name} is ready") from None


def _connect() -> None:
    """Blocks. Ray leaves this process's signals and logs alone."""
    if not ray.is_initialized():
        ray.init(address="auto", log_to_driver=False, configure_logging=False)


async def _handle(app_name: str) -> "DeploymentHandle[Any]":
    """Wait until the application is deployed."""
    while True:
        try:
            return await asyncio.to_thread(open_handle, app_name)
        except RayServeException as error:
            structlog.get_logger("loraplex.ray").info(
                "waiting for Serve", app=app_name, reason=str(error)[:200]
            )
            await asyncio.sleep(SERVE_POLL_S)


def open_handle(app_name: str) -> "DeploymentHandle[Any]":
    """Blocks: the options open the handle's one router, which all handles made from it share."""
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    return serve.get_deployment_handle(DEPLOYMENT, app_name).options(method_name="generate", stream=True)


async def _leave(ready: "asyncio.Task[None]") -> None:
    ready.cancel()
    await asyncio.gather(ready, return_exceptions=True)
    await asyncio.to_thread(ray.shutdown)
