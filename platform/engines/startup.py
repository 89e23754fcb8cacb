"""Opens the engines of a process: starts a supervised child, or attaches to the sockets of other processes.

Invariant: an engine that was started ends with the stack, also when its start has not ended.
"""

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loraplex.engine.fake_engine import FakeScript
from loraplex.platform.config import Settings
from loraplex.platform.engines import wire
from loraplex.platform.engines.engine_config import engine_config
from loraplex.platform.engines.poison_memory import PoisonMemory
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.engines.process import EngineProcess, EngineProcessOptions
from loraplex.platform.engines.remote_client import OnDeath, RemoteEngine, ignore_death
from loraplex.platform.processes.restart_budget import RestartPolicy
from loraplex.platform.startup_errors import EngineStartFailed, SettingsError

RUN_FOLDER = "run"
SOCKET_NAME = "engine.{pid}.sock"
MAX_RESTARTS = 8
"""Within `RestartPolicy.window_s`, of an engine without a gateway: that process exits then, and its supervisor restarts it."""

OnStage = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StartingEngines:
    """The engines of a gateway while they start. `ready` ends when they take requests, or with the error of their start."""

    pool: EnginePool
    ready: "asyncio.Task[None]"
    is_described: asyncio.Event

    async def described(self) -> None:
        """Wait until `pool.info()` is known, which is long before `ready`. Raises the error that ends the start."""
        waiting = asyncio.create_task(self.is_described.wait())
        try:
            await asyncio.wait({waiting, self.ready}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self.ready.done():
            self.ready.result()


def start_engines(
    settings: Settings, model: str | None, stack: AsyncExitStack, on_stage: OnStage
) -> StartingEngines:
    """Begin to open the engines of a gateway; `stack` ends them. `model` is None when other processes run them.

    `ready` raises `EngineStartFailed`. Raises `SettingsError`.
    """
    if model is None:
        return _start_attaching(settings, stack, on_stage)
    address, memory = own_address(settings.data_dir, stack), PoisonMemory()
    process = _process(settings, model, address, on_stage, RestartPolicy(), memory.record_death)
    ready = asyncio.create_task(process.start())
    stack.push_async_callback(process.stop)
    stack.push_async_callback(_end, ready)
    return StartingEngines(EnginePool([process.client], memory), ready, process.described)


async def open_lone_engine(
    settings: Settings, model: str, address: str, stack: AsyncExitStack, on_stage: OnStage
) -> EngineProcess:
    """Start the engine of a process without a gateway; it ends in a crash loop. Waits until the engine is ready."""
    policy = RestartPolicy(max_restarts=MAX_RESTARTS)
    process = _process(settings, model, address, on_stage, policy, ignore_death)
    await process.start()
    stack.push_async_callback(process.stop)
    return process


def _process(
    settings: Settings,
    model: str,
    address: str,
    on_stage: OnStage,
    restart: RestartPolicy,
    on_death: OnDeath,
) -> EngineProcess:
    options = EngineProcessOptions(
        address=address,
        config=engine_config(settings, model),
        fake=_fake_script(settings, model),
        restart=restart,
        start_timeout_s=settings.engine_start_timeout_s,
        drain_s=settings.drain_s,
        log_level=settings.log_level,
    )
    return EngineProcess(options, on_stage, on_death)


def _start_attaching(settings: Settings, stack: AsyncExitStack, on_stage: OnStage) -> StartingEngines:
    memory = PoisonMemory()
    engines = [RemoteEngine(address, on_death=memory.record_death) for address in settings.engine]
    for engine in engines:
        engine.start()
        stack.push_async_callback(engine.close)
    on_stage("waiting for " + ", ".join(settings.engine))
    pool = EnginePool(engines, memory)
    ready = asyncio.create_task(_attach(settings, engines, pool))
    stack.push_async_callback(_end, ready)
    return StartingEngines(pool, ready, asyncio.Event())


async def _attach(settings: Settings, engines: Sequence[RemoteEngine], pool: EnginePool) -> None:
    waiting = [asyncio.create_task(engine.wait_ready()) for engine in engines]
    done, missing = await asyncio.wait(
        waiting, timeout=settings.engine_start_timeout_s, return_when=asyncio.FIRST_COMPLETED
    )
    for task in missing:
        task.cancel()
    if not done:
        raise EngineStartFailed("no engine responds at " + ", ".join(settings.engine))
    pool.require_one_model()


async def _end(start: "asyncio.Task[None]") -> None:
    """End a start that still runs. Its error, if any, has been raised where it was waited for."""
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)


def own_address(data_dir: Path, stack: AsyncExitStack) -> str:
    """A socket below the data directory, or in a private temporary folder where that path is too long."""
    folder, name = data_dir / RUN_FOLDER, SOCKET_NAME.format(pid=os.getpid())
    if len(os.fsencode(folder / name)) > wire.MAX_SOCKET_PATH:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loraplex-run-")))
    else:
        _remove_stale_sockets(folder)
    return f"{wire.SCHEME}{folder / name}"


def _remove_stale_sockets(folder: Path) -> None:
    """Remove the sockets of killed servers. The process id in a socket's name is that of its server."""
    for file in folder.glob(SOCKET_NAME.format(pid="*")):
        owner = file.name.split(".")[1]
        if not (owner.isdecimal() and _lives(int(owner))):
            file.unlink(missing_ok=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # the process of another user
    return True


def _fake_script(settings: Settings, model: str) -> FakeScript | None:
    if settings.fake_engine is None:
        return None
    try:
        script = msgspec.json.decode(settings.fake_engine.read_bytes(), type=FakeScript)
    except (OSError, msgspec.MsgspecError) as error:
        raise SettingsError(f"setting `fake_engine`: {settings.fake_engine}: {error}") from None
    return msgspec.structs.replace(script, info=msgspec.structs.replace(script.info, model_path=model))
