"""Opens the engines of a process: starts supervised children, or attaches to the sockets of other processes.

Invariant: an engine that was started ends with the stack, also when its start has not ended.
"""

import asyncio
import os
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from loraplex.engine.fake_engine import FakeScript
from loraplex.platform.config import Settings
from loraplex.platform.engines import wire
from loraplex.platform.engines.attached_engines import AttachedEngines
from loraplex.platform.engines.engine_config import engine_config
from loraplex.platform.engines.engine_places import EnginePlace, engine_places
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.engines.process import EngineProcess, EngineProcessOptions
from loraplex.platform.engines.remote_client import RemoteEngine
from loraplex.platform.engines.supervised_engines import SupervisedEngines
from loraplex.platform.processes.restart_budget import RestartPolicy
from loraplex.platform.startup_errors import SettingsError

RUN_FOLDER = "run"
SOCKET_NAME = "engine.{pid}.{number}.sock"
MAX_NUMBER = 9999
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
    return _start_supervised(settings, model, stack, on_stage)


def _start_supervised(
    settings: Settings, model: str, stack: AsyncExitStack, on_stage: OnStage
) -> StartingEngines:
    places = engine_places(settings.engines, settings.device)
    count, folder, described = (
        settings.engines or len(places),
        socket_folder(settings.data_dir, stack),
        asyncio.Event(),
    )
    pool = EnginePool()

    def make(number: int, place: EnginePlace) -> EngineProcess:
        address = own_address(folder, number)
        options = replace(
            _options(settings, model, address), config=engine_config(settings, model, count), place=place
        )
        named = on_stage if count == 1 else lambda text: on_stage(f"engine {number}: {text}")
        return EngineProcess(options, named, pool.poison_memory.record_death, described)

    pool.fleet = engines = SupervisedEngines(pool, places, make, settings.drain_s)
    ready = asyncio.create_task(engines.start(count))
    stack.push_async_callback(engines.stop)
    stack.push_async_callback(_end, ready)
    return StartingEngines(pool, ready, described)


async def open_lone_engine(
    settings: Settings, model: str, address: str, stack: AsyncExitStack, on_stage: OnStage
) -> EngineProcess:
    """Start the engine of a process without a gateway; it ends in a crash loop. Waits until the engine is ready."""
    policy = RestartPolicy(max_restarts=MAX_RESTARTS)
    process = EngineProcess(replace(_options(settings, model, address), restart=policy), on_stage)
    await process.start()
    stack.push_async_callback(process.stop)
    return process


def _options(settings: Settings, model: str, address: str) -> EngineProcessOptions:
    return EngineProcessOptions(
        address=address,
        config=engine_config(settings, model),
        fake=_fake_script(settings, model),
        start_timeout_s=settings.engine_start_timeout_s,
        drain_s=settings.drain_s,
        log_level=settings.log_level,
        data_dir=str(settings.data_dir),
    )


def _start_attaching(settings: Settings, stack: AsyncExitStack, on_stage: OnStage) -> StartingEngines:
    pool = EnginePool()
    connect = partial(RemoteEngine, on_death=pool.poison_memory.record_death)
    pool.fleet = engines = AttachedEngines(pool, settings.engine, connect, settings.drain_s)
    stack.push_async_callback(engines.close)
    on_stage("waiting for " + ", ".join(settings.engine))
    ready = asyncio.create_task(engines.start(settings.engine_start_timeout_s))
    for task in (ready, asyncio.create_task(engines.follow())):
        stack.push_async_callback(_end, task)
    return StartingEngines(pool, ready, asyncio.Event())


async def _end(start: "asyncio.Task[None]") -> None:
    """End a start that still runs. Its error, if any, has been raised where it was waited for."""
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)


def socket_folder(data_dir: Path, stack: AsyncExitStack) -> Path:
    """The folder of this process's sockets: below the data directory, or a private temporary one where that path is too long."""
    folder, longest = data_dir / RUN_FOLDER, SOCKET_NAME.format(pid=os.getpid(), number=MAX_NUMBER)
    if len(os.fsencode(folder / longest)) > wire.MAX_SOCKET_PATH:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loraplex-run-")))
    _remove_stale_sockets(folder)
    return folder


def own_address(folder: Path, number: int = 0) -> str:
    """The address of this process's engine of that number."""
    return f"{wire.SCHEME}{folder / SOCKET_NAME.format(pid=os.getpid(), number=number)}"


def _remove_stale_sockets(folder: Path) -> None:
    """Remove the sockets of killed servers. The process id in a socket's name is that of its server."""
    for file in folder.glob(SOCKET_NAME.format(pid="*", number="*")):
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
