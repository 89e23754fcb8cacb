"""Probes: whether the next request would be admitted, and which dependencies this gateway is without.

Invariant: they read state that a background task updates and wait for nothing, so many probes cause little load, and liveness
does not depend on the engine.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import structlog
from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from loraplex.engine.messages import EngineStats
from loraplex.platform.engines.pool import EnginePool, ObservedEngine
from loraplex.platform.observability.metrics import Metrics
from loraplex.tenants.single_flight import SingleFlight

Ping = Callable[[], Coroutine[Any, Any, None]]

DEPENDENCY_INTERVAL_S = 1.0
DEPENDENCY_TIMEOUT_S = 2.0
FRESH_S = 5.0
HYSTERESIS_S = 2.0
RETRY_AFTER_S = 2
NO_ENGINE = "there is no engine"
READY_STALL_S = 20.0
LOG = structlog.get_logger("loraplex.health")


Reasons = Mapping[str, Sequence[str]]
"""Why each state holds, by its name, such as `journal`."""


@dataclass(slots=True)
class _Held:
    began: float
    seen: float
    reasons: Sequence[str]


@dataclass(slots=True)
class RefusingStates:
    """The states in which this gateway refuses what it is asked for, with one log line at the begin and one at the end of each.

    `refused`: what they refuse, for people. A state holds from the moment it is seen until it was not seen for `HYSTERESIS_S`, so
    that readiness does not flap.
    """

    refused: str
    _held: dict[str, _Held] = field(default_factory=dict, init=False)

    def observe(self, found: Reasons, now: float) -> list[str]:
        """Take what holds at `now`, a time of one clock; return the reasons of all states that hold."""
        for state, reasons in found.items():
            held = self._held.get(state)
            if held is None:
                LOG.warning(f"refusing {self.refused}", state=state, reasons=list(reasons))
                self._held[state] = _Held(now, now, reasons)
            else:
                held.seen, held.reasons = now, reasons
        for state in [name for name, held in self._held.items() if now - held.seen >= HYSTERESIS_S]:
            held = self._held.pop(state)
            LOG.info(f"not refusing {self.refused} any more", state=state, seconds=round(now - held.began, 1))
        return [reason for held in self._held.values() for reason in held.reasons]


@dataclass(frozen=True, slots=True)
class Dependency:
    """A store that `ping` reaches. The gateway answers without it for `grace_s`; None: as long as it is away."""

    ping: Ping
    grace_s: float | None = None


@dataclass(frozen=True, slots=True)
class Outage:
    """A dependency that is away: since when, and the newest error."""

    since: datetime
    error: str


@dataclass(slots=True, kw_only=True)
class Health:
    """Readiness of this gateway. An engine with work that completes no step for `stall_s` is not ready.

    `journal_trouble`: why the usage journal would refuse an admission now. `storage_trouble`: why uploads are refused, which is
    logged and no reason against readiness. `draining`: it shuts down, and is not ready; from `refusing` on, it takes no new request.
    `down`: since when each dependency that is away has been, by `clock`; `outages` has the same for people.
    """

    engines: EnginePool
    dependencies: Mapping[str, Dependency]
    metrics: Metrics
    stall_s: float = READY_STALL_S
    clock: Callable[[], float] = time.monotonic
    journal_trouble: Callable[[], str | None] = lambda: None
    storage_trouble: Callable[[], Coroutine[Any, Any, str | None]] | None = None
    pings: SingleFlight[None] = field(default_factory=SingleFlight[None])
    storage_probes: SingleFlight[str | None] = field(
        default_factory=lambda: SingleFlight[str | None](cancels=False)
    )
    refusing_requests: RefusingStates = field(default_factory=lambda: RefusingStates("requests"))
    refusing_uploads: RefusingStates = field(default_factory=lambda: RefusingStates("uploads"))
    draining: bool = False
    refusing: bool = False
    down: dict[str, float] = field(default_factory=dict)
    outages: dict[str, Outage] = field(default_factory=dict)
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def reasons(self) -> list[str]:
        """Why the next request would be refused; empty when it would be admitted."""
        engines = [self._trouble(engine) for engine in self.engines.observed().values()] or [NO_ENGINE]
        found: dict[str, list[str | None]] = {
            "database": [self._missing(name) for name in sorted(self.down)],
            "engine": engines if all(engines) else [],
            "journal": [self.journal_trouble()],
        }
        known = {state: [reason for reason in reasons if reason] for state, reasons in found.items()}
        holding = {state: reasons for state, reasons in known.items() if reasons}
        # The shutdown logs its own begin and end.
        drain = ["the server is shutting down"] if self.draining else []
        return drain + self.refusing_requests.observe(holding, self.clock())

    def dependency_states(self) -> dict[str, str]:
        """`up` or `down` for each dependency."""
        return {name: "down" if name in self.down else "up" for name in self.dependencies}

    async def watch(self) -> None:
        """Ping every dependency each second and log what refuses, until cancelled. Begins when the engines are ready."""
        while True:
            await self.check()
            self.reasons()
            await asyncio.sleep(DEPENDENCY_INTERVAL_S)

    async def check(self) -> None:
        """Ping every dependency once."""
        self.metrics.set_tasks(len(asyncio.all_tasks()))
        await asyncio.gather(
            self._check_storage(),
            *(self._check_one(name, each.ping) for name, each in self.dependencies.items()),
        )

    async def _check_storage(self) -> None:
        if self.storage_trouble is None:
            return
        try:
            async with asyncio.timeout(DEPENDENCY_TIMEOUT_S):
                trouble = await self.storage_probes.run(None, self.storage_trouble)
        except TimeoutError:
            trouble = f"the disk of the uploads did not answer within {DEPENDENCY_TIMEOUT_S:g} s"
        self.refusing_uploads.observe({"disk": [trouble]} if trouble else {}, self.clock())

    async def _check_one(self, name: str, ping: Ping) -> None:
        try:
            # As a task of its own: a driver may take seconds to cancel what a silent server was asked.
            async with asyncio.timeout(DEPENDENCY_TIMEOUT_S):
                await self.pings.run(name, ping)
        except Exception as error:  # noqa: BLE001 - any error of a client library means that the dependency is down
            if name not in self.down:
                LOG.warning("dependency down", name=name, error=str(error)[:200])
            self.down.setdefault(name, self.clock())
            known = self.outages.get(name)
            since = datetime.now(UTC) if known is None else known.since
            self.outages[name] = Outage(since, str(error)[:200] or type(error).__name__)
        else:
            self.down.pop(name, None)
            self.outages.pop(name, None)
        self.metrics.set_dependency(name, name not in self.down)

    def _missing(self, name: str) -> str | None:
        grace_s, away_s = self.dependencies[name].grace_s, self.clock() - self.down[name]
        if grace_s is None or away_s < grace_s:
            return None
        return f"{name} has been down for more than {grace_s:g} s"

    def _trouble(self, engine: ObservedEngine) -> str | None:
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
    """Build the routes that take no credentials: `/livez`, `/readyz`, `/startupz`, `/health` and `/ping` (as readyz), and
    `/version`, as vLLM has it.
    """
    router = APIRouter(include_in_schema=False)

    async def alive() -> Response:
        return JSONResponse({"status": "ok"})

    async def installed() -> Response:
        return JSONResponse({"version": version("loraplex")})

    async def ready() -> Response:
        reasons, dependencies = health.reasons(), health.dependency_states()
        if reasons:
            body = {"status": "unavailable", "reasons": reasons, "dependencies": dependencies}
            return JSONResponse(body, 503, headers={"retry-after": str(RETRY_AFTER_S)})
        return JSONResponse({"status": "ok", "dependencies": dependencies})

    for path, endpoint in (("/livez", alive), ("/startupz", alive), ("/readyz", ready), ("/health", ready)):
        router.add_api_route(path, endpoint, methods=["GET"], response_model=None)
    router.add_api_route("/ping", ready, methods=["GET", "POST"], response_model=None)
    router.add_api_route("/version", installed, methods=["GET"], response_model=None)
    return router
