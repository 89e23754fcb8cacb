"""Processes of the upload tests: a server that can be watched, a client that can be killed, a server that dies at work.

Run as `python -c "from tests.platform.web.adapters.upload_program import serve; serve()" …` at the root.
"""

import asyncio
import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from uuid import UUID

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from tests.platform.web.upload_server import CONFIG, WEIGHTS, UploadHome

from loraplex.adapters.errors import AdaptersError
from loraplex.adapters.limits import UploadConfig
from loraplex.platform.auth.authenticator import Authenticator
from loraplex.platform.errors import GatewayError, describe
from loraplex.platform.inference.dependencies import ServingConfig
from loraplex.platform.observability.request_id import RequestIds
from loraplex.platform.server.secret import derive
from loraplex.platform.web.adapters import upload_routes
from loraplex.platform.web.adapters.upload_receiver import UploadReceiver
from loraplex.platform.web.app import error_response
from loraplex.platform.web.planes import Planes
from loraplex.platform.web.transport.body_budget import BodyBudget
from loraplex.tenants.actors import Actor
from loraplex.tenants.database import Database
from loraplex.tenants.errors import TenantsError
from loraplex.tenants.registry.records import AcceptedVersion
from loraplex.tenants.registry.uploads import DeclaredFile


async def on_error(request: Request, error: Exception) -> Response:
    return error_response(request, describe(error))


def upload_app(database: Database, home: UploadHome) -> FastAPI:
    """The upload routes alone, without a model."""
    dependencies: Any = SimpleNamespace(
        database=database,
        derive_key=partial(derive, b"secret"),
        policy_publisher=None,
        config=ServingConfig(),
    )
    app = FastAPI()
    app.state.body_budget = BodyBudget(1 << 20)
    app.state.planes = planes = Planes(dependencies, Authenticator(database, 0))
    app.state.upload_receiver = UploadReceiver(home.uploads.in_turns(planes.runner.slot))
    app.include_router(upload_routes.router, prefix="/tenant/v1")
    for error in (GatewayError, AdaptersError, TenantsError):
        app.add_exception_handler(error, on_error)
    app.add_middleware(RequestIds)
    return app


def serve() -> None:
    """Arguments: database address, folder, part size. Prints its port."""
    url, folder, part_bytes = sys.argv[1:]

    async def run() -> None:
        home = UploadHome(Database(url), Path(folder), None, UploadConfig(part_bytes=int(part_bytes)))
        config = uvicorn.Config(upload_app(home.database, home), port=0, log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.005)
        print(server.servers[0].sockets[0].getsockname()[1], flush=True)
        await task

    asyncio.run(run())


def send() -> None:
    """Arguments: base address, key, upload, file, part size. Prints the number of each part that was taken."""
    url, key, upload, file, part_bytes = sys.argv[1:]
    with (
        httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=120) as client,
        Path(file).open("rb") as content,
    ):
        number = 0
        while part := content.read(int(part_bytes)):
            number += 1
            client.put(f"/uploads/{upload}/{WEIGHTS}/parts/{number}", content=part).raise_for_status()
            print(number, flush=True)


def die() -> None:
    """Arguments: database address, folder, tenant, upload, seconds of a claim. Ends without a word while it has the claim."""
    url, folder, tenant, upload, seconds = sys.argv[1:]

    async def kill(*_: object, **__: object) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    async def run() -> None:
        home = UploadHome(Database(url), Path(folder), None, UploadConfig(lease_s=float(seconds)))
        home.lifecycle.register = kill  # type: ignore[method-assign]
        await submit_whole(home, UUID(tenant), UUID(upload))

    asyncio.run(run())


async def submit_whole(home: UploadHome, tenant_id: UUID, upload_id: UUID) -> AcceptedVersion:
    """A whole folder, as its route hands it on."""

    async def receive(staged: Path) -> list[DeclaredFile]:
        for name in (CONFIG, WEIGHTS):
            (staged / name).write_bytes(b"x")
        return [DeclaredFile(name, 1, "a" * 64) for name in (CONFIG, WEIGHTS)]

    actor = Actor("key", "tester", None, None)
    return await home.uploads.submit(
        tenant_id, "support", receive, size_bytes=2, actor=actor, upload_id=upload_id
    )
