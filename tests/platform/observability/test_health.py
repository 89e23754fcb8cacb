"""Probes: readiness follows engine, dependencies and draining; liveness follows nothing."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI
from tests.platform.engines.managed_engine import Managed

from loraplex.engine.messages import EngineStats
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.observability import health as health_module
from loraplex.platform.observability.health import Health, health_router
from loraplex.platform.observability.metrics import Metrics


async def well() -> None:
    return None


async def refuses() -> None:
    raise ConnectionRefusedError("no")


async def hangs() -> None:
    await asyncio.sleep(60)


@pytest.fixture
def engines() -> list[Managed]:
    return [Managed(), Managed()]


@pytest.fixture
def health(engines: list[Managed]) -> Health:
    pool = EnginePool(engines)
    return Health(
        engines=pool,
        pings={"postgresql": well, "valkey": well},
        metrics=Metrics("m", "1", 100, pool),
        stall_s=5,
    )


async def status(health: Health, path: str) -> httpx.Response:
    app = FastAPI()
    app.include_router(health_router(health))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return await client.get(path)


async def test_ready(health: Health) -> None:
    await health.check()
    for path in ("/livez", "/readyz", "/startupz", "/health", "/metrics"):
        assert (await status(health, path)).status_code == 200
    assert 'loraplex_dependency_up{dependency="valkey"} 1.0' in (await status(health, "/metrics")).text


@pytest.mark.parametrize("ping", [refuses, hangs])
async def test_a_dependency_that_is_down(
    health: Health, ping: health_module.Ping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_module, "DEPENDENCY_TIMEOUT_S", 0.05)
    health.pings = {"postgresql": ping}
    await health.check()
    answer = await status(health, "/readyz")
    assert answer.status_code == 503 and answer.headers["retry-after"] == "2"
    assert answer.json()["reasons"] == ["postgresql is down"]
    assert (await status(health, "/livez")).status_code == 200
    health.pings = {"postgresql": well}
    await health.check()
    assert health.reasons() == []


async def test_one_engine_well_is_ready_none_is_not(health: Health, engines: list[Managed]) -> None:
    engines[0].connected = False
    assert health.reasons() == []
    engines[1].last_stats = EngineStats(running=1, heartbeat_age_s=6.0)
    assert "the engine does not respond" in health.reasons()
    engines[1].last_stats = EngineStats(running=0, heartbeat_age_s=6.0)
    assert health.reasons() == []
    engines[1].failure = "crash loop"
    assert "crash loop" in health.reasons()


async def test_draining(health: Health) -> None:
    health.draining = True
    assert (await status(health, "/readyz")).status_code == 503
    assert (await status(health, "/livez")).status_code == 200
