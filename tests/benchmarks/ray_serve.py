"""Engine replicas on Ray Serve behind three gateways: adapter hits, scale, a killed replica, a rolling update, quotas.

Invariant: Ray and the gateways run in a network namespace with a loopback alone; the stores are reached over unix sockets.
"""

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec
from tests.benchmarks.checkout import CHECKOUT
from tests.benchmarks.ray_world import RayPlan
from tests.platform.ray.namespace import may_make_namespaces, namespaced, ray_environment

from loraplex.platform.bench.report import BenchFailed, Case, Ratio, Report
from loraplex.platform.datastores.embedded.servers import EmbeddedServices
from loraplex.platform.datastores.migrations import upgrade
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database
from loraplex.tenants.models import Quota
from loraplex.tenants.scopes import INFERENCE

COLUMNS: Final = ("value", "unit")
LIMIT_S: Final = 1200.0
LIMITED: Final = ("insufficient_quota", "rate_limit_exceeded")
"""Of a limit that is used up, and of one that is while other requests run."""
QUOTA: Final = 2000
"""Tokens a day of the tenant with a limit: 250 requests of 4 + 4 tokens."""


async def measure_ray(model: str, progress: Callable[[str], None]) -> Report:
    """Raises `BenchFailed`."""
    if not may_make_namespaces():
        raise BenchFailed("this user may not make network namespaces")
    with TemporaryDirectory(prefix="lr", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "data").mkdir(mode=0o700)
        async with EmbeddedServices(folder / "stores") as services:
            plan = await _plan(folder, model, services)
            return report_of(await asyncio.to_thread(_run, plan, progress))


async def _plan(folder: Path, model: str, services: EmbeddedServices) -> RayPlan:
    await asyncio.to_thread(upgrade, services.database_url)
    database = Database(services.database_url)
    async with database.as_operator() as session:
        load, tenant, limited = [
            await TenantRepository(session).create(name) for name in ("load", "drills", "limited")
        ]
        load_key = await KeyRepository(session).create(load.id, "bench", [INFERENCE])
        key = await KeyRepository(session).create(tenant.id, "bench", [INFERENCE])
        limited_key = await KeyRepository(session).create(limited.id, "bench", [INFERENCE])
        session.add(Quota(tenant_id=limited.id, tokens_per_day=QUOTA))
    await database.close()
    return RayPlan(
        folder=str(folder),
        model=str(Path(model).absolute()),
        database_url=services.database_url,
        redis_url=services.redis_url,
        load_key=load_key.plaintext,
        tenant_id=tenant.id,
        key=key.plaintext,
        limited_key=limited_key.plaintext,
        quota=QUOTA,
    )


def _run(plan: RayPlan, progress: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Run `ray_world`; return its facts by name."""
    with subprocess.Popen(
        namespaced("tests.benchmarks.ray_world"),
        cwd=CHECKOUT,
        env=ray_environment(Path(plan.folder)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as world:
        if world.stdin is None or world.stdout is None:
            raise BenchFailed("no pipe")
        world.stdin.write(msgspec.json.encode(plan) + b"\n")
        world.stdin.flush()
        found = {}
        for line in world.stdout:
            if line.startswith(b'{"measured"'):
                fact = json.loads(line)
                found[fact.pop("measured")] = fact
                progress(line.decode().strip())
    if world.returncode != 0:
        raise BenchFailed("the measurement ended early")
    return found


def report_of(found: dict[str, dict[str, Any]]) -> Report:
    """The figures with their requirements."""
    report = Report("ray", COLUMNS)
    hits, kill, update, quota = (found[name] for name in ("hits", "kill", "rolling_update", "quota"))
    refused = sum(quota["last"].get(code, 0) for code in LIMITED)
    for name, value, unit in (
        ("adapter hits of the router", hits["router"], "share"),
        ("adapter hits at random", hits["random"], "share"),
        ("tokens per second, 1 replica", found["scale"]["one_replica_tokens_per_s"], "tokens/s"),
        ("tokens per second, 3 replicas", found["scale"]["three_replicas_tokens_per_s"], "tokens/s"),
        ("SIGKILL of a replica under 32 streams: errors", sum(kill["errors"].values()), "requests"),
        ("SIGKILL of a replica: recovery", kill["recovery_s"], "s"),
        ("SIGKILL of a replica: ledger drift", kill["drift"]["drift_pico"], "pico-units"),
        ("rolling update under 32 streams: errors", sum(update["errors"].values()), "requests"),
        ("quota of tokens at 3 gateways: allowed", quota["allowed"], "requests"),
        ("quota of tokens at 3 gateways: answered", quota["answered"], "requests"),
        ("quota of tokens at 3 gateways: refused by it (429)", refused, "requests"),
        ("quota of tokens at 3 gateways: counters late (503), repeated", quota["unknown"], "replies"),
    ):
        report.cases.append(Case(name, {}, {"value": value, "unit": unit}))
    answered = quota["answered"] / quota["allowed"]
    refused_share = refused / quota["allowed"]
    report.ratios += [
        Ratio("adapter hits: router / random", hits["router"] / hits["random"], 1.1),
        Ratio("tokens per second: 3 replicas / 1", found["scale"]["ratio"], 2.5),
        Ratio("SIGKILL of a replica: failed requests", float(sum(kill["errors"].values())), 0.0, "at most"),
        Ratio("rolling update: failed requests", float(sum(update["errors"].values())), 0.0, "at most"),
        Ratio("requests answered / allowed by the quota", answered, 1.0, "at most"),
        Ratio("requests answered / allowed by the quota", answered, 1.0, "at least"),
        Ratio("requests refused by the quota / beyond it", refused_share, 1.0, "at least"),
    ]
    report.notes += [
        f"SIGKILL: {kill['requests']} requests, errors {kill['errors']}",
        "A gateway whose counters do not answer within 50 ms refuses what is limited by the day: it cannot know what is left.",
    ]
    return report
