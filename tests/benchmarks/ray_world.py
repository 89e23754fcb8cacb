"""What `ray_serve` measures inside the network namespace: `python -m tests.benchmarks.ray_world` reads a `RayPlan` as one line.

Invariant: gateways are real `loraplex serve --role gateway` processes, and clients reach the replicas through them alone, except
for adapter hits, where the client of a gateway is driven directly.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any, Final
from uuid import UUID

import httpx
import msgspec
import ray
from tests.benchmarks.random_router import RandomRouter
from tests.platform.ray.cluster import APP, Gateway, cluster, deploy, engine_processes, gateway, request
from tests.platform.ray.namespace import raise_loopback

from loraplex.engine.fake_engine import DEFAULT_INFO, FakeScript
from loraplex.engine.messages import Finished
from loraplex.platform.bench.client import CompletionRequest
from loraplex.platform.bench.load import run_load
from loraplex.platform.bench.report import BenchFailed
from loraplex.platform.drills.ledger_drift import measure_drift
from loraplex.platform.drills.traffic import Traffic, recovery_s
from loraplex.platform.ray.deployment import STATS_S
from loraplex.tenants.database import Database

MODEL: Final = "ray"
GATEWAYS, REPLICAS = 3, 3
ROWS: Final = 8
ADAPTERS, SLOTS = 48, 24
RUN: Final = "from loraplex.platform.cli.main import main; main()"
TOKEN_S, TOKENS = 0.1, 16
STREAMS: Final = 32
START_S: Final = 180.0
SHIP_S: Final = 30.0
ANSWERED: Final = "answered"
UNKNOWN: Final = "quota_unavailable"
REPEAT_S: Final = 60.0


class RayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses of the stores, and keys of three tenants: one for load, `tenant_id` for drills, one with `quota` tokens a day."""

    folder: str
    model: str
    database_url: str
    redis_url: str
    load_key: str
    tenant_id: UUID
    key: str
    limited_key: str
    quota: int


async def measure(plan: RayPlan) -> None:
    folder = Path(plan.folder)
    settings = {"model": plan.model, "max_num_seqs": ROWS, "max_waiting": 0}
    # A vocabulary as large as any tokenizer's.
    script = FakeScript(
        info=msgspec.structs.replace(DEFAULT_INFO, vocab_size=200_000), token_interval_s=TOKEN_S
    )
    database = Database(plan.database_url, pool_size=2)
    await asyncio.to_thread(deploy, folder, script, 1, settings)
    with gateways(plan) as urls:
        one = await throughput(urls, plan, 8 * ROWS)
        await asyncio.to_thread(deploy, folder, script, REPLICAS, settings)
        three = await throughput(urls, plan, 8 * ROWS * REPLICAS)
        emit("scale", one_replica_tokens_per_s=one, three_replicas_tokens_per_s=three, ratio=three / one)
        emit("quota", **await quota(urls, plan))
        # Room for 32 streams on two replicas while the third is replaced.
        settings = {**settings, "max_num_seqs": STREAMS}
        await asyncio.to_thread(deploy, folder, script, REPLICAS, settings)
        await killed_replica(urls, plan, database)
        await rolling_update(urls, plan, database, folder, script, settings)
    await database.close()
    await hits(folder, settings)


async def throughput(urls: Sequence[str], plan: RayPlan, count: int) -> float:
    """Completion tokens per second of a closed loop with more requests than the replicas have rows."""
    prompt = CompletionRequest(MODEL, [3, 4, 5], TOKENS, plan.load_key)
    began = time.perf_counter()
    shares = [count // GATEWAYS] * GATEWAYS
    loads = await asyncio.gather(
        *(run_load(url, [prompt] * share, 2 * ROWS) for url, share in zip(urls, shares, strict=True))
    )
    for load in loads:
        load.require_complete()
    return sum(shares) * TOKENS / (time.perf_counter() - began)


async def quota(urls: Sequence[str], plan: RayPlan) -> dict[str, Any]:
    """Twice as many requests as a tenant's tokens of the day allow, at all gateways at once.

    A gateway that the counters do not answer within 50 ms cannot know what is left of a day, and says so (503); its client asks
    again, as the reply says. `unknown` counts these replies.
    """
    allowed = plan.quota // 8
    headers = {"authorization": f"Bearer {plan.limited_key}"}
    limits = httpx.Limits(max_connections=24)
    async with httpx.AsyncClient(headers=headers, timeout=60, limits=limits) as client:
        codes = await asyncio.gather(*(_codes(client, urls[n % GATEWAYS]) for n in range(2 * allowed)))
    last = Counter(each[-1] for each in codes)
    unknown = sum(each.count(UNKNOWN) for each in codes)
    return {"allowed": allowed, "answered": last[ANSWERED], "last": dict(last), "unknown": unknown}


async def _codes(client: httpx.AsyncClient, url: str) -> list[str]:
    """The codes of the replies to one request, of which the last one is final."""
    codes: list[str] = []
    until = time.monotonic() + REPEAT_S
    while True:
        body = {"model": MODEL, "prompt": [3, 4, 5, 6], "max_tokens": 4}
        response = await client.post(f"{url}/v1/completions", json=body)
        codes.append(ANSWERED if response.is_success else response.json()["error"]["code"])
        if codes[-1] != UNKNOWN or time.monotonic() > until:
            return codes
        await asyncio.sleep(float(response.headers["retry-after"]))


async def killed_replica(urls: Sequence[str], plan: RayPlan, database: Database) -> None:
    """SIGKILL of a replica under 32 streams."""
    rate = STREAMS / (TOKENS * 2 * TOKEN_S)
    async with Traffic(urls, plan.key, MODEL, rate, 2 * TOKENS, stream_share=1.0) as traffic:
        await asyncio.sleep(4)
        killed_at = time.monotonic()
        os.kill(next(iter(engine_processes())), signal.SIGKILL)
        await asyncio.sleep(12)
        await traffic.stop()
    drift = await measure_drift(database, plan.tenant_id, traffic.outcomes, SHIP_S)
    emit(
        "kill",
        requests=len(traffic.outcomes),
        errors=dict(traffic.errors),
        recovery_s=recovery_s(traffic.outcomes, killed_at),
        drift=asdict(drift),
        drift_is_zero=drift.is_zero,
    )


async def rolling_update(
    urls: Sequence[str],
    plan: RayPlan,
    database: Database,
    folder: Path,
    script: FakeScript,
    settings: dict[str, Any],
) -> None:
    """Another version of the deployment while 32 streams run."""
    rate = STREAMS / (TOKENS * 2 * TOKEN_S)
    before = set(engine_processes())
    began = time.monotonic()
    async with Traffic(urls, plan.key, MODEL, rate, 2 * TOKENS, stream_share=1.0) as traffic:
        await asyncio.sleep(2)
        await asyncio.to_thread(deploy, folder, script, REPLICAS, {**settings, "max_model_len": 4096})
        while before & set(engine_processes()):
            await asyncio.sleep(0.2)
        await asyncio.sleep(2)
        await traffic.stop()
    emit(
        "rolling_update",
        requests=len(traffic.outcomes),
        errors=dict(traffic.errors),
        seconds=time.monotonic() - began,
        replaced=not before & set(engine_processes()),
    )


async def hits(folder: Path, settings: dict[str, Any]) -> None:
    """Adapter hits of the router and of a random one, on the same Zipf traffic over more adapters than replicas have room for."""
    script = FakeScript(token_interval_s=0.002, adapter_slots=SLOTS)
    rates = {}
    random_router = {"request_router_class": RandomRouter, "request_routing_stats_period_s": STATS_S}
    for app, options in (("placed", {}), ("random", {"request_router_config": random_router})):
        await asyncio.to_thread(deploy, folder, script, REPLICAS, settings, app=app, **options)
        async with gateway(folder, app) as client:
            await client.until_ready(REPLICAS)
            rates[app] = await hit_rate(client)
    emit("hits", router=rates["placed"], random=rates["random"], adapters=ADAPTERS, slots=SLOTS)


async def hit_rate(client: Gateway, count: int = 2000) -> float:
    weights = [1 / (rank + 1) for rank in range(ADAPTERS)]
    order = Random(7).choices(range(ADAPTERS), weights, k=count)
    limit = asyncio.Semaphore(16)

    async def send(number: int, adapter: int) -> None:
        async with limit:
            events = await client.collect(request(f"hit-{number}", 8, adapter=client.adapter(adapter)))
        if not isinstance(events[-1], Finished):
            raise BenchFailed(f"a request failed: {events[-1]}")

    await asyncio.gather(*(send(*each) for each in enumerate(order)))
    await asyncio.sleep(2)  # for the newest statistics
    loads = sum(view.last_stats.adapter_loads for view in client.replicas.views.values() if view.last_stats)
    return 1 - loads / count


@contextmanager
def gateways(plan: RayPlan) -> Iterator[list[str]]:
    """Run three gateways on the stores of the plan, each a driver of the Ray cluster."""
    own = {
        "DATABASE_URL": plan.database_url,
        "REDIS_URL": plan.redis_url,
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "LORAPLEX_DATA_DIR": str(Path(plan.folder) / "data"),
        "LORAPLEX_SERVED_MODEL_NAME": MODEL,
        "LORAPLEX_LOG_LEVEL": "warning",
        "LORAPLEX_PRICE_PROMPT": "100000",
        "LORAPLEX_PRICE_COMPLETION": "400000",
        "LORAPLEX_CONSOLE": "false",
    }
    command = (sys.executable, "-c", RUN, "serve", "--role", "gateway", "--port", "0")
    processes = [
        subprocess.Popen(
            (*command, "--engine", f"ray://{APP}"), env={**os.environ, **own}, stdout=subprocess.PIPE
        )
        for _ in range(GATEWAYS)
    ]
    try:
        yield [address(process) for process in processes]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)


def address(process: "subprocess.Popen[bytes]") -> str:
    """Wait until a gateway serves. Raises `BenchFailed`."""
    line = "" if process.stdout is None else process.stdout.readline().decode()
    found = re.search(r"http://[^/\s]+", line)
    if found is None:
        raise BenchFailed("a gateway did not start")
    for _ in range(int(START_S)):
        with suppress(httpx.TransportError):
            if httpx.get(f"{found[0]}/readyz").status_code == 200:
                return found[0]
        time.sleep(1)
    raise BenchFailed("a gateway was not ready")


def emit(name: str, **facts: Any) -> None:
    print(json.dumps({"measured": name, **facts}), flush=True)


def main() -> None:
    plan = msgspec.json.decode(sys.stdin.readline(), type=RayPlan)
    raise_loopback()
    with cluster():
        asyncio.run(measure(plan))


if __name__ == "__main__":
    main()
