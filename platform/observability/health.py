"""Probes and `/metrics`.

Invariant: they read state that a background task updates and wait for nothing, so many probes cause little load, and liveness
does not depend on the engine.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import structlog
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from loraplex.engine.messages import EngineStats
from loraplex.platform.engines.pool import EnginePool, ManagedEngine
from loraplex.platform.observability.metrics import Metrics

Ping = Callable[[], Awaitable[None]]

DEPENDENCY_INTERVAL_S = 1.0
DEPENDENCY_TIMEOUT_S = 2.0
FRESH_S = 5.0
RETRY_AFTER_S = 2


@dataclass(slots=True, kw_only=True)
class Health:
    """Readiness of this gateway. An engine with work that completes no step for `stall_s` is not ready."""

    engines: EnginePool
    pings: Mapping[str, Ping]
    metrics: Metrics
    stall_s: float = 20.0
    draining: bool = False
    down: dict[str, str] = field(default_factory=dict)

    def reasons(self) -> list[str]:
        """Why this gateway is not ready; empty when it is ready."""
        reasons = ["the server is shutting down"] if self.draining else []
        reasons += [f"{name} is down" for name in sorted(self.down)]
        troubles = [self._trouble(engine) for engine in self.engines.engines]
        if all(troubles):
            reasons += [trouble for trouble in troubles if trouble]
        return reasons

    async def watch(self) -> None:
        """Ping every dependency each second, until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(DEPENDENCY_INTERVAL_S)

    async def check(self) -> None:
        """Ping every dependency once."""
        self.metrics.set_tasks(len(asyncio.all_tasks()))
        await asyncio.gather(*(self._check_one(name, ping) for name, ping in self.pings.items()))

    async def _check_one(self, name: str, ping: Ping) -> None:
        try:
            async with asyncio.timeout(DEPENDENCY_TIMEOUT_S):
                await ping()
        except Exception as error:  # noqa: BLE001 - any error of a client library means that the dependency is down
            if name not in self.down:
                structlog.get_logger("loraplex.health").warning(
                    "dependency down", name=name, error=str(error)[:200]
                )
            self.down[name] = type(error).__name__
        else:
            self.down.pop(name, None)
        self.metrics.set_dependency(name, name not in self.down)

    def _trouble(self, engine: ManagedEngine) -> str | None:
        stats = engine.last_stats or EngineStats()
        if engine.failure is not None:
            return engine.failure
        if not engine.connected or engine.silent_for() > FRESH_S:
            return "the engine does not respond"
        if stats.draining:
            return "the engine is draining"
        if stats.running + stats.waiting > 0 and stats.heartbeat_age_s > self.stall_s:
            return f"the engine has work and completed no step for {stats.heartbeat_age_s:.0f} s"
        return None


def health_router(health: Health) -> APIRouter:
    """`/livez`, `/readyz`, `/startupz`, `/health` (as readyz) and `/metrics`, without credentials."""
    router = APIRouter(include_in_schema=False)

    async def alive() -> Response:
        return JSONResponse({"status": "ok"})

    async def ready() -> Response:
        reasons = health.reasons()
        if reasons:
            body = {"status": "unavailable", "reasons": reasons}
            return JSONResponse(body, 503, headers={"retry-after": str(RETRY_AFTER_S)})
        return JSONResponse({"status": "ok"})

    async def metrics() -> Response:
        return Response(health.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})

    for path, endpoint in (
        ("/livez", alive),
        ("/startupz", alive),
        ("/readyz", ready),
        ("/health", ready),
        ("/metrics", metrics),
    ):
        router.add_api_route(path, endpoint, methods=["GET"], response_model=None)
    return router
