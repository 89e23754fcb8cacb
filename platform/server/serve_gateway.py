"""Runs a gateway: opens it beside the start of its engines, announces it, and serves until a signal.

Invariant: `serve.py` imports this module after it has started the engine, because its imports take as long as the engine's.
"""

import asyncio
import socket
import sys
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace
from typing import Final

import structlog
from fastapi import FastAPI

from loraplex.platform.config import Settings
from loraplex.platform.observability.exposition import metrics_router
from loraplex.platform.processes.gc_tuning import freeze_gc
from loraplex.platform.processes.progress import Progress
from loraplex.platform.server.certificate import ServerCertificate, reload_at_hangup
from loraplex.platform.server.connection_limiter import (
    ConnectionLimiter,
    RefusalRecorder,
    reserve_descriptors,
)
from loraplex.platform.server.gateway import OpenGateway, open_gateway
from loraplex.platform.server.gateway_address import GatewayAddress, announced
from loraplex.platform.server.listening import root_url
from loraplex.platform.server.prices import PRICE_SETTINGS
from loraplex.platform.server.process_signals import Shutdown
from loraplex.platform.server.start import GatewayStart, bounded_stage
from loraplex.platform.server.uvicorn_server import BACKLOG, HttpListener, serve_until_stopped, serving
from loraplex.platform.startup_errors import DependencyFailed
from loraplex.platform.web.transport.head_requests import HeadRequests
from loraplex.tenants.actors import system_actor
from loraplex.tenants.api_keys.networks import parse_network
from loraplex.tenants.database import Database
from loraplex.tenants.people.accounts import has_operator, invite_operator, was_operator_invited
from loraplex.tenants.people.records import link_address
from loraplex.tenants.unit_of_work import unit_of_work

LOG = structlog.get_logger("loraplex.serve")
METRICS_CONNECTIONS = 64
MAX_CONNECTIONS_PER_ADDRESS: Final = 1024
"""Of one client address, or one /64 of IPv6; `trusted_proxies` are exempt."""
DEMO_PRICES: Final = {"price_prompt": 100_000, "price_cached_prompt": 50_000, "price_completion": 400_000}
"""The demo's first rate card, if no setting names a price: so its usage and bills have amounts."""


@dataclass(frozen=True, slots=True)
class Listeners:
    """The bound sockets of a gateway, and what encrypts them. `metrics` is None where the API's port serves them."""

    api: socket.socket
    metrics: socket.socket | None
    certificate: ServerCertificate | None = None


async def serve_gateway(start: GatewayStart, listeners: Listeners, shutdown: Shutdown) -> None:
    """Serve until a signal. Raises `StartError`."""
    settings, on_stage = start.settings, start.on_stage
    if settings.demo and not PRICE_SETTINGS & settings.model_fields_set:
        settings = settings.model_copy(update=DEMO_PRICES)
        start = replace(start, settings=settings)
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(open_gateway(start))
        before, after = await _announcements(settings, gateway, listeners.api, on_stage)
        # Whoever reads the address may use it at once: until the server accepts, connections wait.
        listeners.api.listen(BACKLOG)
        stack.enter_context(announced(settings.data_dir, _address(settings, listeners.api)))
        on_stage.finish()
        print(before, flush=True)
        shutdown.started()
        if listeners.certificate is not None:
            reload_at_hangup(listeners.certificate)
        if listeners.metrics is not None:
            print(f"Serving metrics at {base_url(settings, listeners.metrics)}/metrics", flush=True)
            limiter = ConnectionLimiter(METRICS_CONNECTIONS, METRICS_CONNECTIONS)
            metrics = HttpListener(listeners.metrics, limiter, listeners.certificate)
            await stack.enter_async_context(_serving_metrics(gateway, metrics, shutdown))
        for exposure in settings.exposures:
            print(f"Warning: {exposure}.", flush=True)
        if after is not None:
            print(f"\n{after}", flush=True)
        freeze_gc()
        lost = asyncio.wrap_future(gateway.stores_lost)
        lost.add_done_callback(lambda _: shutdown.drain.set())
        await serve_until_stopped(
            gateway.app,
            _bounded(settings, gateway, listeners),
            gateway.health,
            gateway.engines,
            shutdown,
            grace_s=settings.drain_grace_s,
            drain_s=settings.drain_s,
        )
        if lost.done():
            raise DependencyFailed(f"the embedded servers could not be kept running: {lost.result()}")


async def _announcements(
    settings: Settings, gateway: OpenGateway, listener: socket.socket, on_stage: Progress
) -> tuple[str, str | None]:
    """Return what is printed before and after the addresses. The demo's snippets come last: what follows is no part of them."""
    if settings.demo:
        on_stage("preparing the demo's tenants and adapters")
        banner = await _demo_banner(settings, gateway, listener)
    else:
        banner = f"Serving {gateway.served_model_name} at {base_url(settings, listener)}/v1"
    root = _address(settings, listener).console_url
    notice = None
    if root is not None:
        async with bounded_stage("looking for an operator in PostgreSQL"):
            shows_link = settings.demo or sys.stdout.isatty()
            notice = await first_run_notice(gateway.database, root, shows_link=shows_link)
    return (f"{notice}\n\n{banner}", None) if settings.demo and notice is not None else (banner, notice)


async def first_run_notice(database: Database, root: str, *, shows_link: bool) -> str | None:
    """Return the text with the link of the first operator, as there is no default password; None where there is an operator.

    `root`: the address of the console. A link makes its bearer an operator, at most once an hour; the newest alone works.
    `shows_link` False: what is printed is collected with the logs, and a server that is restarted again and again would fill them
    with links. Raises `DatabaseUnavailable`.
    """
    if await has_operator(database):
        return None
    actor = system_actor("serve")
    if not shows_link or await was_operator_invited(database, actor.name):
        return "There is no operator yet: `loraplex user create --operator` prints a link for the first one."
    async with unit_of_work(database, actor, None, None) as uow:
        token = await invite_operator(uow)
    return (
        "Become the first operator by this link. It works once, for an hour; "
        "`loraplex user create --operator` prints another:\n"
        f"  {link_address(root, token, operator=True)}"
    )


def _bounded(settings: Settings, gateway: OpenGateway, listeners: Listeners) -> HttpListener:
    """Bound the connections of the gateway's listener, and export their number."""
    metrics = gateway.health.metrics
    fitting = reserve_descriptors(settings.max_connections)
    if fitting < settings.max_connections:
        LOG.warning("fewer connections than configured: raise the limit of open files", connections=fitting)
    limiter = ConnectionLimiter(
        fitting,
        MAX_CONNECTIONS_PER_ADDRESS,
        tuple(map(parse_network, settings.trusted_proxies)),
        RefusalRecorder(metrics.connection_refused),
    )
    metrics.watch_connections(lambda: limiter.open_connections)
    return HttpListener(listeners.api, limiter, listeners.certificate)


def _serving_metrics(
    gateway: OpenGateway, listener: HttpListener, shutdown: Shutdown
) -> AbstractAsyncContextManager[None]:
    app = FastAPI(openapi_url=None)
    app.include_router(metrics_router(gateway.exposition))
    app.add_middleware(HeadRequests)
    return serving(app, listener, shutdown)


async def _demo_banner(settings: Settings, gateway: OpenGateway, listener: socket.socket) -> str:
    from loraplex.adapters.push import FolderPush
    from loraplex.adapters.storage.blob_store import BlobStore
    from loraplex.adapters.target_modules import BaseModel, adaptable_modules
    from loraplex.adapters.validation.own_files import OwnFilesValidation
    from loraplex.engine.checkpoints.config_reader import load_model_config
    from loraplex.platform.demo.announcement import announcement
    from loraplex.platform.demo.demo_file import DEMO_FILE
    from loraplex.platform.demo.tenants import prepare_demo

    info = gateway.engines.info()
    modules = adaptable_modules(load_model_config(info.model_path))
    push = FolderPush(
        gateway.database,
        lambda tenant_id: unit_of_work(gateway.database, system_actor("demo"), tenant_id, None),
        BlobStore(gateway.adapters, None, info.model_digest),
        OwnFilesValidation(BaseModel(modules, info.model_digest)),
    )
    address = _address(settings, listener)
    access = await prepare_demo(
        gateway.database,
        push,
        settings.data_dir,
        base_url=address.base_url,
        console_root=address.console_url,
        model=gateway.served_model_name,
    )
    return announcement(access, settings.data_dir / DEMO_FILE)


def _address(settings: Settings, listener: socket.socket) -> GatewayAddress:
    own = base_url(settings, listener)
    return GatewayAddress(own, (settings.public_url or own) if settings.console else None)


def base_url(settings: Settings, listener: socket.socket) -> str:
    """The URL by which a client on this machine reaches the listener."""
    host, port = listener.getsockname()[:2]
    return root_url(host, port, settings.scheme)
