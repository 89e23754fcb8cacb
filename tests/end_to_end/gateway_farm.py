"""Several gateway processes on shared stores, each with a scripted engine of its own: `python -m tests.end_to_end.gateway_farm`.

Reads a `FarmPlan` as one line of JSON, forks after everything is imported, and writes each gateway's process id and port.
Prompts are token ids; there is no tokenizer and no grammar. All of it ends with its standard input.
"""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import msgspec
import uvicorn
from tests.tenants.billing.fixed_prices import fixed_prices

from loraplex.adapters.limits import UploadConfig
from loraplex.engine.fake_engine import FakeEngine, FakeScript
from loraplex.platform.inference.dependencies import GatewayDependencies, ServingConfig
from loraplex.platform.processes.parent_death import die_with_parent
from loraplex.platform.web.app import create_app
from loraplex.tenants.admission.config import AdmissionConfig
from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.admission.recovery import ship_left_behind
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.database import Database
from loraplex.tenants.ledger.journal.journal import Journal
from loraplex.tenants.valkey import ANSWER_SECONDS, open_valkey

MODEL = "farm"
JOURNAL_BYTES = 64 << 20


class FarmPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Prices in micro-units per million tokens, times in seconds. `journals`: the folder of all gateways' journals."""

    database_url: str
    valkey_url: str
    journals: str
    gateways: int
    price_prompt: int
    price_cached: int
    price_completion: int
    lease_s: float
    heartbeat_s: float
    valkey_s: float
    script: FakeScript


class FarmGateway(msgspec.Struct, frozen=True):
    """A process that answers at a port of this machine."""

    pid: int
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def price_of(plan: FarmPlan) -> Price:
    return Price(prompt=plan.price_prompt, cached_prompt=plan.price_cached, completion=plan.price_completion)


def settings_of(plan: FarmPlan) -> AdmissionConfig:
    return AdmissionConfig(
        lease_s=plan.lease_s,
        gateway_live_s=plan.lease_s,
        heartbeat_s=plan.heartbeat_s,
        valkey_s=plan.valkey_s,
        probe_s=plan.heartbeat_s,
        retry_s=plan.heartbeat_s,
    )


async def serve(plan: FarmPlan, listener: socket.socket) -> None:
    """One gateway, until it is killed."""
    database = Database(plan.database_url, pool_size=3)
    fast = open_valkey(plan.valkey_url, command_s=max(plan.valkey_s, ANSWER_SECONDS))
    bulk_redis = open_valkey(plan.valkey_url)
    gateway_id, folder = uuid4(), Path(plan.journals)
    tenants = await ship_left_behind(database, folder, max_bytes=JOURNAL_BYTES, lease_s=plan.lease_s)
    journal = await Journal.open(folder, gateway_id, max_bytes=JOURNAL_BYTES)
    admissions = QuotaAdmissionController(
        database,
        fast,
        fixed_prices(price_of(plan)),
        gateway_id,
        settings_of(plan),
        journal=journal,
        bulk_redis=bulk_redis,
    )
    admissions.rebuild_later(tenants)
    upkeep = asyncio.create_task(admissions.maintenance.run())
    app = create_app(services(plan.script, database, admissions))
    config = uvicorn.Config(app, log_level="error", lifespan="off", access_log=False, ws="none")
    await uvicorn.Server(config).serve(sockets=[listener])
    upkeep.cancel()


def services(
    script: FakeScript, database: Database, admissions: QuotaAdmissionController
) -> GatewayDependencies:
    absent: Any = SimpleNamespace(
        special_tokens=frozenset(),
        record=lambda timings: None,
        record_adapter=lambda digest, name: None,
        continuation_ids=None,
        thought_markers=None,
    )
    no_uploads: Any = SimpleNamespace(limits=UploadConfig())
    no_uploads.in_turns = lambda turn: no_uploads
    return GatewayDependencies(
        served_model_name=MODEL,
        database=database,
        engine=FakeEngine(script),
        prompts=absent,
        token_text=absent,
        recorder=absent,
        request_analysis=absent,
        compile_checks=absent,
        value_validation=absent,
        suite_checks=absent,
        admission_controller=admissions,
        policy_publisher=admissions,
        namespace_of=namespace_of,
        derive_key=lambda *parts: bytes(32),
        uploads=no_uploads,
        adapter_path=adapter_path,
        config=ServingConfig(),
    )


async def adapter_path(tenant_id: UUID, digest: str) -> str:
    return f"/{tenant_id}/{digest}"


def namespace_of(tenant_id: UUID) -> bytes:
    return tenant_id.bytes * 2


def fork(plan: FarmPlan) -> FarmGateway:
    listener, parent = socket.socket(), os.getpid()
    listener.bind(("127.0.0.1", 0))
    listener.listen(256)
    pid = os.fork()
    if pid == 0:
        die_with_parent(parent)
        os.close(0)
        asyncio.run(serve(plan, listener))
        os._exit(0)
    port: int = listener.getsockname()[1]
    listener.close()
    return FarmGateway(pid, port)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    plan = msgspec.json.decode(sys.stdin.buffer.readline(), type=FarmPlan)
    gateways = [fork(plan) for _ in range(plan.gateways)]
    sys.stdout.buffer.write(msgspec.json.encode(gateways) + b"\n")
    sys.stdout.buffer.flush()
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
