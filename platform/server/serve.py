"""Runs a serving process by its role: all, gateway or engine.

Invariant: a taken port and a wrong setting are reported before anything is started. The engine starts first of all, so this
module imports little: what a gateway consists of is imported while the engine loads.
"""

import asyncio
import errno
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from importlib import import_module
from pathlib import Path

import structlog

from loraplex.adapters.errors import AdaptersError, BlobStoreUnavailable
from loraplex.engine.errors import EngineError
from loraplex.platform.config import EVERY_ORIGIN, Settings
from loraplex.platform.engines import wire
from loraplex.platform.engines.attached_engines import is_pattern
from loraplex.platform.engines.startup import OnStage, StartingEngines, open_lone_engine, start_engines
from loraplex.platform.processes.environment import ray_requires_tokens
from loraplex.platform.processes.gc_tuning import freeze_gc, paused_gc
from loraplex.platform.processes.log_files import also_log_to
from loraplex.platform.processes.progress import shown_progress
from loraplex.platform.server.certificate import read_certificate
from loraplex.platform.server.connection_limiter import reserve_descriptors
from loraplex.platform.server.listening import bind
from loraplex.platform.server.process_signals import Shutdown
from loraplex.platform.server.start import GatewayStart
from loraplex.platform.setting_types import ANY_ORIGIN
from loraplex.platform.startup_errors import (
    DependencyFailed,
    EngineStartFailed,
    MachineUnfit,
    PortTaken,
    SettingsError,
)
from loraplex.tenants.errors import JournalFull, JournalUnavailable, StoreUnavailable, TenantsError

LOG = structlog.get_logger("loraplex.serve")


async def serve(settings: Settings, *, accept_new_secret: bool = False) -> None:
    """Serve until a signal. Raises `StartError`, or `CancelledError` when a signal arrives during the start."""
    _require_role_settings(settings)
    for warning in settings.without_effect:
        LOG.warning(warning)
    if accept_new_secret and settings.role == "engine":
        raise SettingsError("flag `--accept-new-secret`: an engine has no secret; give it to a gateway")
    if settings.role != "engine":
        reserve_descriptors(settings.max_connections)
    if settings.model is not None and settings.role != "gateway" and settings.fake_engine is None:
        _require_model(settings.model)
    shutdown = Shutdown()
    shutdown.install()
    with one_line_errors(shutdown, settings.data_dir):
        if settings.role == "engine":
            await _serve_engine(settings, shutdown)
        else:
            await _serve_gateway(settings, shutdown, accept_new_secret=accept_new_secret)


@contextmanager
def one_line_errors(shutdown: Shutdown, data_dir: Path) -> Iterator[None]:
    """Report a fault during the start. Raises `MachineUnfit` for a file or a disk, `DependencyFailed` for what is elsewhere."""
    try:
        yield
    except (OSError, AdaptersError, TenantsError) as error:
        if shutdown.starting is None:
            raise
        cause = error if isinstance(error, OSError) else error.__cause__
        number, file = (cause.errno, cause.filename) if isinstance(cause, OSError) else (None, None)
        line = f"the start failed: {error}"
        remedy = _remedy(number, file is not None, data_dir)
        if remedy is not None:
            named = "" if file is None or str(file) in line else f" ({file})"
            raise MachineUnfit(f"{line}{named}; {remedy}") from error
        is_elsewhere = isinstance(error, OSError | StoreUnavailable | BlobStoreUnavailable)
        if is_elsewhere and not isinstance(error, JournalFull | JournalUnavailable):
            raise DependencyFailed(line) from error
        raise MachineUnfit(line) from error


def _remedy(number: int | None, is_file: bool, data_dir: Path) -> str | None:
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"free some room on the disk of {data_dir}"
    if number in (errno.EMFILE, errno.ENFILE):
        return "raise the limit of open files (systemd: LimitNOFILE)"
    if not is_file:
        return None
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"let this user read and write everything below {data_dir}"
    return f"repair it or move it out of {data_dir}, then start again"


def _require_role_settings(settings: Settings) -> None:
    """Check settings that depend on each other. Raises `SettingsError`."""
    if settings.ray_application is None:
        for address in settings.engine:
            wire.socket_path(address)
    elif settings.role != "gateway":
        raise SettingsError("setting `engine`: ray://APP needs --role gateway; Ray Serve runs the engines")
    elif not ray_requires_tokens():
        raise SettingsError(
            "setting `engine`: ray://APP needs the environment variable RAY_AUTH_MODE=token: without tokens everyone who"
            " reaches a port of Ray can run code in this process"
        )
    if settings.role == "engine" and (len(settings.engine) != 1 or is_pattern(settings.engine[0])):
        raise SettingsError(
            "setting `engine`: role engine needs exactly one --engine ipc:///path to listen on"
        )
    if settings.role == "gateway" and not settings.engine:
        raise SettingsError("setting `engine`: role gateway needs at least one --engine ipc:///path")
    if settings.role == "all" and settings.engine:
        raise SettingsError(
            "setting `engine`: role all runs its own engines; use --role gateway with --engine"
        )
    if settings.role != "all" and settings.engines is not None:
        raise SettingsError(
            "setting `engines`: role all alone starts several; see --engine of the other roles"
        )
    if settings.model is None and settings.role != "gateway" and not settings.demo:
        raise SettingsError("setting `model`: none given; pass --model FOLDER_OR_HUB_ID, or --demo")
    if settings.otlp_endpoint is not None:
        from loraplex.platform.server.request_observers import load_tracing

        load_tracing()


def _require_model(model: str) -> None:
    """Check a model on this disk; one of the hub is checked by the engine, which fetches it. Raises `SettingsError`."""
    from loraplex.engine.checkpoints.config_reader import load_model_config
    from loraplex.engine.checkpoints.model_files import local_model, weight_files

    try:
        if (found := local_model(model)) is not None:
            load_model_config(str(found))
            weight_files(found)
    except (EngineError, OSError) as error:
        raise SettingsError(f"setting `model`: {error}") from None


async def _serve_engine(settings: Settings, shutdown: Shutdown) -> None:
    address = settings.engine[0]
    model = await _model(settings)
    also_log_to(settings.data_dir, "supervisor")
    async with AsyncExitStack() as stack:
        on_stage = stack.enter_context(shown_progress())
        engine = await open_lone_engine(settings, model, address, stack, on_stage)
        on_stage.finish()
        shutdown.started()
        print(f"Serving {engine.client.info().model_path} to gateways on {address}", flush=True)
        freeze_gc()
        await _first_of(shutdown.drain, engine.crash_loop, engine.drained)
        if engine.crash_loop.is_set():
            raise EngineStartFailed(str(engine.client.failure))


async def _serve_gateway(settings: Settings, shutdown: Shutdown, *, accept_new_secret: bool = False) -> None:
    certificate = read_certificate(settings)
    with ExitStack() as sockets:
        listener = sockets.enter_context(bind(settings.host, settings.port))
        metrics_socket = None
        if settings.metrics_port is not None:
            _require_own_port(settings, listener)
            metrics_socket = sockets.enter_context(
                bind(settings.host, settings.metrics_port, "--metrics-port")
            )
        for exposure in settings.exposures:
            LOG.warning(exposure, host=settings.host)
        if ANY_ORIGIN in settings.allowed_origins:
            LOG.warning(EVERY_ORIGIN)
        settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        also_log_to(settings.data_dir, "gateway")
        model = None if settings.role == "gateway" else await _model(settings)
        async with AsyncExitStack() as stack:
            on_stage = stack.enter_context(shown_progress())
            engines = _start_engines(settings, model, stack, on_stage)
            # On a thread, since the loop has to start the engine meanwhile and to hear signals.
            with paused_gc():
                await asyncio.to_thread(import_module, "loraplex.platform.server.serve_gateway")
            from loraplex.platform.server.serve_gateway import Listeners, serve_gateway

            start = GatewayStart(
                settings=settings,
                model=model,
                engines=engines,
                on_stage=on_stage,
                accept_new_secret=accept_new_secret,
            )
            await serve_gateway(start, Listeners(listener, metrics_socket, certificate), shutdown)


def _start_engines(
    settings: Settings, model: str | None, stack: AsyncExitStack, on_stage: OnStage
) -> StartingEngines:
    """Begin to open the engines. Ray is imported by gateways of Ray alone. Raises `SettingsError`."""
    if settings.ray_application is None:
        return start_engines(settings, model, stack, on_stage)
    try:
        from loraplex.platform.ray.startup import start_ray_engine
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"setting `engine`: ray:// needs the extra `ray` (pip install loraplex[ray]): {error}"
        ) from None
    return start_ray_engine(settings, settings.ray_application, stack, on_stage)


def _require_own_port(settings: Settings, listener: socket.socket) -> None:
    """Check that the metrics have another port: Linux binds one twice before it listens. Raises `PortTaken`."""
    port = listener.getsockname()[1]
    if settings.metrics_port == port:
        raise PortTaken(settings.host, port, "the API has this port", "--metrics-port")


async def _model(settings: Settings) -> str:
    """Return the model's folder or hub id: the demo's where none is set, which `_require_role_settings` allows it alone."""
    if settings.model is not None:
        return settings.model
    from loraplex.platform.demo.model import ensure_demo_model

    return str(await asyncio.to_thread(ensure_demo_model, settings.data_dir))


async def _first_of(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
