"""`GET /operator/v1/engine`: the model, and the adapters by memory tier, queues and KV cache of each engine.

Invariant: the route does not wait for an engine of the pool that does not respond; it reads the newest snapshots.
"""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends
from starlette.responses import Response

from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.messages import EngineInfo, EngineStats
from loraplex.platform.auth.authenticator import Authenticator, OperatorCaller
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.inference.dependencies import GatewayDependencies
from loraplex.platform.web.responses import ApiResponse, ResponseModel, documented, respond


class ModelFacts(ResponseModel):
    """`digest`: of configuration and weights, to which adapters are bound. `system_fingerprint`: as in responses."""

    served_name: str
    digest: str
    system_fingerprint: str | None
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int


class DeviceTier(ResponseModel):
    """Adapters on the device. `adapters`: digests, the least recently used first."""

    adapters: list[str]
    pinned: int
    bytes: int
    budget_bytes: int
    loads: int
    load_failures: int
    evictions: int


class HostTier(ResponseModel):
    bytes: int
    hits: int


class Residency(ResponseModel):
    device: DeviceTier
    host: HostTier


class Queues(ResponseModel):
    """Numbers of sequences. `heartbeat_age_s`: seconds since the last step; `steps`: since the engine's start. `step_adapters`:
    the digests of the adapters that the rows of the newest step had; `base` stands for the base model.
    """

    running: int
    waiting: int
    waiting_for_adapter: int
    waiting_for_grammar: int
    heartbeat_age_s: float
    steps: int
    step_adapters: list[str]


class KvCache(ResponseModel):
    """Blocks of `block_size` tokens; cached ones may be evicted. Prefix counters are tokens."""

    block_size: int
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    referenced_blocks: int
    prefix_queries: int
    prefix_hits: int


class EngineDocument(ResponseModel):
    """The parts are null while the engine does not respond. `failure`: why it does not run, if known."""

    connected: bool
    draining: bool
    restarts: int
    failure: str | None
    residency: Residency | None
    queues: Queues | None
    kv: KvCache | None


class EnginesDocument(ResponseModel):
    model: ModelFacts
    engines: list[EngineDocument]


def engine_router(dependencies: GatewayDependencies, authenticator: Authenticator) -> APIRouter:
    router = APIRouter()
    operator = Depends(authenticator.requires_operator())

    @router.get("/engine", responses=documented(response=EnginesDocument))
    async def show_engines(caller: Annotated[OperatorCaller, operator]) -> Response:
        info = dependencies.engine.info()
        engines = await engines_of(dependencies, info.block_size)
        return respond(
            ApiResponse(200, EnginesDocument(model=model_facts(dependencies, info), engines=engines))
        )

    return router


async def engines_of(dependencies: GatewayDependencies, block_size: int) -> list[EngineDocument]:
    """Describe every engine of a pool by its newest snapshot, or the single engine by its current state."""
    engine = dependencies.engine
    if isinstance(engine, EnginePool):
        return [
            document(each.last_stats if each.connected else None, block_size, each.restarts, each.failure)
            for each in engine.observed().values()
        ]
    try:
        return [document(await engine.stats(), block_size)]
    except EngineUnavailable as error:
        return [document(None, block_size, failure=str(error))]


def model_facts(dependencies: GatewayDependencies, info: EngineInfo) -> ModelFacts:
    facts = msgspec.structs.asdict(info)
    names = ("architecture", "dtype", "vocab_size", "max_model_len")
    return ModelFacts(
        served_name=dependencies.served_model_name,
        digest=info.model_digest,
        system_fingerprint=info.system_fingerprint,
        **{name: facts[name] for name in names},
    )


def document(
    stats: EngineStats | None, block_size: int, restarts: int = 0, failure: str | None = None
) -> EngineDocument:
    return EngineDocument(
        connected=stats is not None,
        draining=stats is not None and stats.draining,
        restarts=restarts,
        failure=failure,
        residency=None if stats is None else residency(stats),
        queues=None if stats is None else queues(stats),
        kv=None if stats is None else kv_cache(stats, block_size),
    )


def residency(stats: EngineStats) -> Residency:
    device = DeviceTier(
        adapters=stats.resident_adapters,
        pinned=stats.pinned_adapters,
        bytes=stats.adapter_bytes,
        budget_bytes=stats.adapter_budget_bytes,
        loads=stats.adapter_loads,
        load_failures=stats.adapter_load_failures,
        evictions=stats.adapter_evictions,
    )
    return Residency(
        device=device, host=HostTier(bytes=stats.adapter_host_bytes, hits=stats.adapter_host_hits)
    )


def queues(stats: EngineStats) -> Queues:
    return Queues(**{name: getattr(stats, name) for name in Queues.model_fields})


def kv_cache(stats: EngineStats, block_size: int) -> KvCache:
    return KvCache(
        block_size=block_size,
        total_blocks=stats.total_blocks,
        free_blocks=stats.free_blocks,
        cached_blocks=stats.cached_blocks,
        referenced_blocks=stats.referenced_blocks,
        prefix_queries=stats.prefix_cache_queries,
        prefix_hits=stats.prefix_cache_hits,
    )
