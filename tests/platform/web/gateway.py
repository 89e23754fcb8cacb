"""A gateway on a real port with a real database and a scripted engine, in the test's own event loop."""

import asyncio
import hashlib
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from uuid import UUID

import fastapi.routing
import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from openai import AsyncOpenAI
from tests.platform.fake_admissions import FakeAdmissions
from tests.platform.web.upload_server import UploadHome
from tests.tenants.registry_records import AliasWriter, RegistryWriter

from loraplex.engine.client import EngineClient
from loraplex.engine.fake_engine import FakeEngine, FakeScript
from loraplex.grammar.spec import GrammarSpec
from loraplex.platform.engines.poison_memory import PoisonMemory
from loraplex.platform.evaluations.suite_check import SuiteChecks
from loraplex.platform.inference.dependencies import GatewayDependencies, ServingConfig
from loraplex.platform.inference.prompting.chat_template import PromptRenderer
from loraplex.platform.inference.prompting.token_text import TokenText
from loraplex.platform.inference.structured_output.build_task import AnalysisSetup
from loraplex.platform.inference.structured_output.request_analysis import (
    RequestAnalysis,
    request_analysis_task,
)
from loraplex.platform.inference.structured_output.value_validation import (
    ValueValidation,
    value_validation_task,
)
from loraplex.platform.observability.request_record import RequestObserver
from loraplex.platform.observability.request_stats import RequestStats
from loraplex.platform.server.secret import derive
from loraplex.platform.web.app import create_app
from loraplex.platform.workers.pool import WorkerPool
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database
from loraplex.tenants.registry.records import AdapterProfile

BASE_MODEL = "demo/base"
SECRET = b"the secret of a test's server"

# Of one name and type, as all applications of a run have them for their thousand answers: half of an application's making.
fastapi.routing.create_model_field = cache(fastapi.routing.create_model_field)  # type: ignore[attr-defined]


def namespace_of(tenant_id: UUID) -> bytes:
    return hashlib.sha256(tenant_id.bytes).digest()


async def blob_path(tenant_id: UUID, digest: str) -> str:
    return f"/blobs/{tenant_id}/{digest}"


@dataclass
class Recorder:
    """Records the stats of all requests, and the names of their adapters by digest."""

    timings: list[RequestStats] = field(default_factory=list)
    adapters: list[tuple[str, str]] = field(default_factory=list)
    questions: Counter[str] = field(default_factory=Counter)

    def record(self, stats: RequestStats) -> None:
        self.timings.append(stats)

    def record_adapter(self, digest: str, name: str) -> None:
        self.adapters.append((digest, name))

    def record_decision(self, questions: Mapping[str, int], seconds: float) -> None:
        self.questions.update(questions)


@dataclass
class FakeCompileChecks:
    """Accepts every grammar, or fails with `error`."""

    error: Exception | None = None
    checked: list[tuple[bytes, GrammarSpec]] = field(default_factory=list)

    async def check(self, namespace: bytes, spec: GrammarSpec, *, param: str | None = None) -> None:
        self.checked.append((namespace, spec))
        if self.error is not None:
            raise self.error


@dataclass
class Gateway:
    """A running gateway and its dependencies."""

    app: FastAPI
    url: str
    engine: FakeEngine
    database: Database
    recorder: Recorder
    compile_checks: FakeCompileChecks
    admissions: Any
    poison_memory: PoisonMemory
    key: str
    stack: AsyncExitStack

    def client(self, key: str | None = None) -> AsyncOpenAI:
        """The official client, closed at the end of the test."""
        client = AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key or self.key, max_retries=0)
        self.stack.push_async_callback(client.close)
        return client

    async def get(self, path: str, headers: list[tuple[str, str]]) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.url, verify=False) as client:
            return await client.get(path, headers=headers)

    async def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        """`body` as JSON, or bytes as they are, with the tenant's key."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with httpx.AsyncClient(base_url=self.url, verify=False) as client:
            return await client.post(
                path, content=content, headers={"authorization": f"Bearer {self.key}", **headers}
            )

    async def tenant(self, name: str, scopes: tuple[str, ...] = ("inference",)) -> str:
        """A new tenant's key."""
        async with self.database.as_operator() as session:
            tenant = await TenantRepository(session).create(name, weight=2.0)
            return (await KeyRepository(session).create(tenant.id, "key", scopes)).plaintext

    async def adapter(
        self, tenant: str, name: str, digest: str, profile: AdapterProfile | None = None
    ) -> None:
        """A further version of a tenant's adapter, in production."""
        async with self.database.as_operator() as session:
            owner = await TenantRepository(session).get(tenant)
            adapters = RegistryWriter(session, owner.id)
            await adapters.get_or_create(name)
            version = await adapters.add_version(
                name, digest=digest, size_bytes=1, rank=8, config={}, report={}, profile=profile
            )
            await AliasWriter(session, owner.id).set(name, "production", {version.version: 100})


StartGateway = Callable[..., Awaitable[Gateway]]


@asynccontextmanager
async def served(app: FastAPI) -> AsyncIterator[str]:
    server = uvicorn.Server(
        uvicorn.Config(
            app, host="127.0.0.1", port=0, log_level="warning", lifespan="off", proxy_headers=False
        )
    )
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    host, port = server.servers[0].sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        task.cancel()
        await asyncio.wait({task})
        await end_connections(server)


async def end_connections(server: uvicorn.Server) -> None:
    """Stop listening and end all connections, within 0.1 s: `Server.shutdown` sleeps as long where none is open."""
    for each in server.servers:
        each.close()
    state = server.server_state
    for connection in list(state.connections):
        connection.shutdown()
    for _ in range(20):
        if not state.connections and not state.tasks:
            return
        await asyncio.sleep(0.005)


@pytest.fixture
async def start_gateway(
    database: Database, chat_tokenizer: Any, tmp_path: Path
) -> AsyncIterator[StartGateway]:
    """A running gateway with the tenant `acme`, unless another database is given.

    `refused`: the error of all compile checks. `real_engine`: in place of the scripted one.
    """
    async with AsyncExitStack() as stack:

        async def start(
            script: FakeScript | None = None,
            limits: ServingConfig | None = None,
            other: Database | None = None,
            adapter_path: Callable[[UUID, str], Awaitable[str]] = blob_path,
            refused: Exception | None = None,
            admissions: Any = None,
            served_model_name: str = BASE_MODEL,
            home: UploadHome | None = None,
            currency_of: Callable[[UUID], str] = lambda _: "USD",
            observers: Sequence[RequestObserver] = (),
            real_engine: EngineClient | None = None,
        ) -> Gateway:
            pool = WorkerPool()
            stack.push_async_callback(pool.close)
            engine, recorder, compile_checks = FakeEngine(script), Recorder(), FakeCompileChecks(refused)
            admissions = admissions or FakeAdmissions()
            limits, prompts = limits or ServingConfig(key_cache_s=0.0), PromptRenderer(chat_tokenizer)
            setup = AnalysisSetup(limits.body, limits.grammar, frozenset(prompts.special_tokens))
            dependencies = GatewayDependencies(
                served_model_name=served_model_name,
                database=other or database,
                engine=real_engine or engine,
                prompts=prompts,
                token_text=TokenText(chat_tokenizer),
                recorder=recorder,
                request_analysis=RequestAnalysis(pool, request_analysis_task(setup, os.environ)),
                compile_checks=compile_checks,
                value_validation=ValueValidation(pool, value_validation_task(os.environ)),
                suite_checks=SuiteChecks(pool, os.environ),
                admission_controller=admissions,
                policy_publisher=admissions,
                namespace_of=namespace_of,
                derive_key=partial(derive, SECRET),
                adapter_path=adapter_path,
                config=limits,
                currency_of=currency_of,
                uploads=(home or UploadHome(other or database, tmp_path / "gateway")).uploads,
            )
            app = create_app(dependencies, observers=observers)
            url = await stack.enter_async_context(served(app))
            memory = dependencies.poison_memory
            gateway = Gateway(
                app, url, engine, database, recorder, compile_checks, admissions, memory, "", stack
            )
            gateway.key = "" if other else await gateway.tenant("acme")
            return gateway

        yield start
