"""Runs a serving process by its role: all, gateway or engine.

Invariant: a taken port and a wrong setting are reported before anything is started.
"""

import asyncio
import socket
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack
from typing import Final

import structlog
from fastapi import FastAPI

from loraplex.platform.config import PLAIN_HTTP, Settings
from loraplex.platform.engines import wire
from loraplex.platform.engines.startup import open_lone_engine
from loraplex.platform.observability.exposition import metrics_router
from loraplex.platform.processes.gc_tuning import freeze_gc
from loraplex.platform.server.connection_limiter import (
    ConnectionLimiter,
    RefusalRecorder,
    reserve_descriptors,
)
from loraplex.platform.server.first_run import first_run_notice
from loraplex.platform.server.gateway import OpenGateway, open_gateway
from loraplex.platform.server.prices import PRICE_SETTINGS
from loraplex.platform.server.progress import shown_progress
from loraplex.platform.server.request_observers import load_tracing
from loraplex.platform.server.uvicorn_server import (
    HttpListener,
    Shutdown,
    bind,
    serve_until_stopped,
    serving,
)
from loraplex.platform.startup_errors import DependencyFailed, EngineStartFailed, PortTaken, SettingsError
from loraplex.tenants.api_keys.networks import parse_network

LOG = structlog.get_logger("loraplex.serve")
METRICS_CONNECTIONS = 64
DEMO_PRICES: Final = {"price_prompt": 100_000, "price_cached_prompt": 50_000, "price_completion": 400_000}
"""The demo's first rate card, if no setting names a price: so its usage and bills have amounts."""


async def serve(settings: Settings, demo: bool) -> None:
    """Serve until a signal. Raises `StartError`, or `CancelledError` when a signal arrives during the start."""
    _require_role_settings(settings, demo)
    shutdown = Shutdown()
    shutdown.install()
    if settings.role == "engine":
        await _serve_engine(settings, demo, shutdown)
    else:
        if demo and not PRICE_SETTINGS & settings.model_fields_set:
            settings = settings.model_copy(update=DEMO_PRICES)
        await _serve_gateway(settings, demo, shutdown)


def _require_role_settings(settings: Settings, demo: bool) -> None:
    """Check settings that depend on each other. Raises `SettingsError`."""
    for address in settings.engine:
        wire.socket_path(address)
    if settings.role == "engine" and len(settings.engine) != 1:
        raise SettingsError(
            "setting `engine`: role engine needs exactly one --engine ipc:///path to listen on"
        )
    if settings.role == "gateway" and not settings.engine:
        raise SettingsError("setting `engine`: role gateway needs at least one --engine ipc:///path")
    if settings.role == "all" and settings.engine:
        raise SettingsError(
            "setting `engine`: role all runs its own engine; use --role gateway with --engine"
        )
    if settings.model is None and settings.role != "gateway" and not demo:
        raise SettingsError("setting `model`: none given; pass --model FOLDER_OR_HUB_ID, or --demo")
    if settings.otlp_endpoint is not None:
        load_tracing()


async def _serve_engine(settings: Settings, demo: bool, shutdown: Shutdown) -> None:
    address = settings.engine[0]
    model = await _model(settings, demo)
    async with AsyncExitStack() as stack:
        on_stage = stack.enter_context(shown_progress())
        engine = await open_lone_engine(settings, model, address, stack, on_stage)
        on_stage.finish()
        shutdown.started()
        print(f"Serving {engine.client.info().model_path} to gateways on {address}", flush=True)
        await _first_of(shutdown.drain, engine.crash_loop)
        if engine.crash_loop.is_set():
            raise EngineStartFailed(str(engine.client.failure))


async def _serve_gateway(settings: Settings, demo: bool, shutdown: Shutdown) -> None:
    with ExitStack() as sockets:
        listener = sockets.enter_context(bind(settings.host, settings.port))
        metrics_socket = None
        if settings.metrics_port is not None:
            _require_own_port(settings, listener)
            metrics_socket = sockets.enter_context(
                bind(settings.host, settings.metrics_port, "--metrics-port")
            )
        if settings.exposes_plain_http:
            LOG.warning(PLAIN_HTTP, host=settings.host)
        settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        model = None if settings.role == "gateway" else await _model(settings, demo)
        async with AsyncExitStack() as stack:
            on_stage = stack.enter_context(shown_progress())
            gateway = await stack.enter_async_context(open_gateway(settings, model, on_stage))
            if demo:
                on_stage("preparing the demo's tenants and adapters")
                banner = await _demo_banner(settings, gateway, listener)
            else:
                banner = f"Serving {gateway.served_model_name} at {base_url(listener)}/v1"
            notice = None
            if settings.console:
                notice = await first_run_notice(gateway.database, _console_root(settings, listener))
            if demo and notice is not None:
                # The snippets come last, so that what follows them is no part of them.
                banner, notice = f"{notice}\n\n{banner}", None
            on_stage.finish()
            print(banner, flush=True)
            shutdown.started()
            if metrics_socket is not None:
                print(f"Serving metrics at {base_url(metrics_socket)}/metrics", flush=True)
                await stack.enter_async_context(_serving_metrics(settings, gateway, metrics_socket, shutdown))
            if notice is not None:
                print(f"\n{notice}", flush=True)
            freeze_gc()
            lost = asyncio.wrap_future(gateway.stores_lost)
            lost.add_done_callback(lambda _: shutdown.drain.set())
            await serve_until_stopped(
                gateway.app,
                _bounded(settings, gateway, listener),
                gateway.health,
                gateway.engines,
                shutdown,
                settings.drain_s,
            )
            if lost.done():
                raise DependencyFailed(f"the embedded servers could not be kept running: {lost.result()}")


def _require_own_port(settings: Settings, listener: socket.socket) -> None:
    """Check that the metrics have another port: Linux binds one twice before it listens. Raises `PortTaken`."""
    port = listener.getsockname()[1]
    if settings.metrics_port == port:
        raise PortTaken(settings.host, port, "the API has this port", "--metrics-port")


def _bounded(settings: Settings, gateway: OpenGateway, listener: socket.socket) -> HttpListener:
    """Bound the connections of the gateway's listener, and export their number."""
    metrics = gateway.health.metrics
    fitting = reserve_descriptors(settings.max_connections)
    if fitting < settings.max_connections:
        LOG.warning("fewer connections than configured: raise the limit of open files", connections=fitting)
    limiter = ConnectionLimiter(
        fitting,
        settings.max_connections_per_address,
        tuple(map(parse_network, settings.trusted_proxies)),
        RefusalRecorder(metrics.connection_refused),
    )
    metrics.watch_connections(lambda: limiter.open_connections)
    return HttpListener(listener, limiter, settings.reader_stall_s)


def _serving_metrics(
    settings: Settings, gateway: OpenGateway, listener: socket.socket, shutdown: Shutdown
) -> AbstractAsyncContextManager[None]:
    app = FastAPI(openapi_url=None)
    app.include_router(metrics_router(gateway.exposition))
    limiter = ConnectionLimiter(METRICS_CONNECTIONS, METRICS_CONNECTIONS)
    return serving(app, HttpListener(listener, limiter, settings.reader_stall_s), shutdown)


async def _model(settings: Settings, demo: bool) -> str:
    if settings.model is not None:
        return settings.model
    if not demo:
        raise SettingsError("setting `model`: none given")
    from loraplex.platform.demo.model import ensure_demo_model

    return str(await asyncio.to_thread(ensure_demo_model, settings.data_dir))


async def _demo_banner(settings: Settings, gateway: OpenGateway, listener: socket.socket) -> str:
    from loraplex.adapters.storage.blob_store import BlobStore
    from loraplex.adapters.target_modules import adaptable_modules
    from loraplex.adapters.validation.own_files import OwnFilesValidation
    from loraplex.engine.checkpoints.config_reader import load_model_config
    from loraplex.platform.demo.announcement import announcement
    from loraplex.platform.demo.demo_file import DEMO_FILE
    from loraplex.platform.demo.tenants import prepare_demo
    from loraplex.platform.services.actors import system_actor
    from loraplex.platform.services.push import FolderPush
    from loraplex.platform.services.unit_of_work import unit_of_work

    info = gateway.engines.info()
    modules = adaptable_modules(load_model_config(info.model_path))
    push = FolderPush(
        gateway.database,
        lambda tenant_id: unit_of_work(gateway.database, system_actor("demo"), tenant_id, None),
        BlobStore(gateway.adapters, None, info.model_digest),
        OwnFilesValidation(modules, info.model_digest),
    )
    access = await prepare_demo(
        gateway.database,
        push,
        settings.data_dir,
        base_url=base_url(listener),
        console_root=_console_root(settings, listener) if settings.console else None,
        model=gateway.served_model_name,
    )
    return announcement(access, settings.data_dir / DEMO_FILE)


def _console_root(settings: Settings, listener: socket.socket) -> str:
    """Return the address of the console in links."""
    return settings.public_url or base_url(listener)


def base_url(listener: socket.socket) -> str:
    """The URL by which a client on this machine reaches the listener."""
    from loraplex.platform.demo.snippet import root_url

    host, port = listener.getsockname()[:2]
    return root_url(host, port)


async def _first_of(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
