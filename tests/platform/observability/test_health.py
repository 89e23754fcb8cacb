"""Probes: readiness says whether the gateway can answer now; a dependency that is survived is a field; liveness follows nothing."""

import asyncio
from collections.abc import Iterator, MutableMapping
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from structlog.testing import capture_logs
from tests.platform.database_proxy import proxied
from tests.platform.engines.managed_engine import Managed

from loraplex.engine.messages import EngineStats
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.observability import health as health_module
from loraplex.platform.observability.health import HYSTERESIS_S, Dependency, Health, health_router
from loraplex.platform.observability.metrics import Metrics
from loraplex.tenants import database as database_module
from loraplex.tenants.circuit_breaker import FAILURES
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable


async def well() -> None:
    return None


async def refuses() -> None:
    raise ConnectionRefusedError("no")


async def hangs() -> None:
    await asyncio.sleep(60)


async def ignores_cancellation() -> None:
    """As a driver that waits for a silent server to confirm a cancellation."""
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(60)


@pytest.fixture
def engines() -> list[Managed]:
    return [Managed(), Managed()]


@pytest.fixture
def health(engines: list[Managed]) -> Health:
    pool = EnginePool(engines)
    return Health(
        engines=pool,
        dependencies={"postgresql": Dependency(well, 30.0), "valkey": Dependency(well)},
        metrics=Metrics("m", "1", 100, pool),
        stall_s=5,
    )


@pytest.fixture
def refusals() -> Iterator[list[MutableMapping[str, Any]]]:
    """The lines that are logged."""
    with capture_logs() as logs:
        yield logs


def states(logs: list[MutableMapping[str, Any]]) -> list[tuple[str, str]]:
    """What began to refuse and ended, in order, among lines of other things such as a dependency that is away."""
    return [(line["event"], line["state"]) for line in logs if "refusing" in line["event"]]


async def status(health: Health, path: str) -> httpx.Response:
    app = FastAPI()
    app.include_router(health_router(health))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return await client.get(path)


async def test_ready(health: Health) -> None:
    await health.check()
    for path in ("/livez", "/readyz", "/startupz", "/health", "/ping"):
        assert (await status(health, path)).status_code == 200
    assert (await status(health, "/readyz")).json()["dependencies"] == {"postgresql": "up", "valkey": "up"}
    assert b'loraplex_dependency_up{dependency="valkey"} 1.0' in health.metrics.render()


@pytest.mark.parametrize("ping", [refuses, hangs, ignores_cancellation])
async def test_valkey_away_is_a_field_and_a_metric(
    health: Health, ping: health_module.Ping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_module, "DEPENDENCY_TIMEOUT_S", 0.05)
    now = 0.0
    health.clock = lambda: now
    health.dependencies = {"postgresql": Dependency(well, 30.0), "valkey": Dependency(ping)}
    await health.check()
    now = 86_400.0
    await health.check()
    answer = await status(health, "/readyz")
    assert answer.status_code == 200
    assert answer.json() == {"status": "ok", "dependencies": {"postgresql": "up", "valkey": "down"}}
    assert [*health.outages] == ["valkey"] and health.outages["valkey"].error
    assert b'loraplex_dependency_up{dependency="valkey"} 0.0' in health.metrics.render()


async def test_postgresql_away_longer_than_its_grace_is_unready(
    health: Health, refusals: list[MutableMapping[str, Any]]
) -> None:
    now = 100.0
    health.clock = lambda: now
    health.dependencies = {"postgresql": Dependency(refuses, 30.0), "valkey": Dependency(well)}
    await health.check()
    now = 129.0
    await health.check()
    assert (await status(health, "/readyz")).json()["dependencies"]["postgresql"] == "down"
    assert health.reasons() == []
    now = 130.0
    answer = await status(health, "/readyz")
    assert answer.status_code == 503 and answer.headers["retry-after"] == "2"
    assert answer.json()["reasons"] == ["postgresql has been down for more than 30 s"]
    assert (await status(health, "/livez")).status_code == 200
    health.dependencies = {"postgresql": Dependency(well, 30.0)}
    await health.check()
    assert health.reasons() and not health.outages
    now = 130.0 + HYSTERESIS_S
    assert health.reasons() == []
    assert states(refusals) == [
        ("refusing requests", "database"),
        ("not refusing requests any more", "database"),
    ]


async def test_a_ping_that_succeeds_ends_the_time_without_postgresql(
    health: Health, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_module, "DEPENDENCY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(database_module, "BOUND_SECONDS", 0.05)
    async with proxied(database.url) as proxy:
        through = Database(proxy.url)
        health.dependencies = {"postgresql": Dependency(through.ping, 30.0)}
        with proxy.silent():
            for _ in range(FAILURES):
                with pytest.raises(DatabaseUnavailable):
                    await through.bounded(through.ping)
                await health.check()
            assert through.breaker.is_open and health.dependency_states() == {"postgresql": "down"}
        monkeypatch.setattr(health_module, "DEPENDENCY_TIMEOUT_S", 60.0)
        await health.check()
        assert not through.breaker.is_open and health.dependency_states() == {"postgresql": "up"}
        await through.close()


async def test_one_engine_well_is_ready_none_is_not(
    health: Health, engines: list[Managed], refusals: list[MutableMapping[str, Any]]
) -> None:
    now = 0.0
    health.clock = lambda: now
    engines[0].connected = False
    assert health.reasons() == []
    engines[1].last_stats = EngineStats(running=1, heartbeat_age_s=6.0)
    assert "the engine does not respond" in health.reasons()
    engines[1].last_stats = EngineStats(running=0, heartbeat_age_s=6.0)
    assert health.reasons()
    now = HYSTERESIS_S
    assert health.reasons() == []
    assert states(refusals) == [("refusing requests", "engine"), ("not refusing requests any more", "engine")]
    assert [line["log_level"] for line in refusals] == ["warning", "info"]
    engines[1].failure = "crash loop"
    assert "crash loop" in health.reasons()


async def test_a_journal_that_would_refuse_is_unready_until_it_took_admissions_for_two_seconds(
    health: Health,
) -> None:
    now, trouble = 0.0, list[str | None]([None])
    health.clock, health.journal_trouble = lambda: now, lambda: trouble[-1]
    with capture_logs() as logs:
        assert health.reasons() == []
        trouble.append("the disk is full")
        answer = await status(health, "/readyz")
        assert answer.status_code == 503 and answer.json()["reasons"] == ["the disk is full"]
        for now in (1.0, 2.0, 3.0):
            trouble.append(None if now == 2.0 else "the disk is full")
            assert health.reasons() == ["the disk is full"]
        trouble.append(None)
        now = 4.9
        assert health.reasons()
        now = 5.0
        assert (await status(health, "/readyz")).status_code == 200
    assert states(logs) == [
        ("refusing requests", "journal"),
        ("not refusing requests any more", "journal"),
    ]
    assert logs[1]["seconds"] == 5.0


async def test_a_full_disk_of_the_uploads_is_logged_and_no_reason(
    health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_module, "DEPENDENCY_TIMEOUT_S", 0.05)
    now, free = 0.0, asyncio.Event()

    async def trouble() -> str | None:
        return None if free.is_set() else "5 bytes are free"

    async def hang() -> str | None:
        await free.wait()
        return None

    health.clock = lambda: now
    with capture_logs() as logs:
        for health.storage_trouble in (trouble, hang):
            await health.check()
        free.set()
        health.storage_trouble = trouble
        now = HYSTERESIS_S
        await health.check()
        assert health.reasons() == []
    assert states(logs) == [
        ("refusing uploads", "disk"),
        ("not refusing uploads any more", "disk"),
    ]


async def test_draining(health: Health) -> None:
    health.draining = True
    answer = await status(health, "/readyz")
    assert answer.status_code == 503 and answer.json()["reasons"] == ["the server is shutting down"]
    assert (await status(health, "/livez")).status_code == 200
