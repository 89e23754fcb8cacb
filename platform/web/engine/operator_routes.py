"""`GET /operator/v1/engine`: the model, and the adapters by memory tier, queues and KV cache of each engine.

Invariant: the route does not wait for an engine of the pool that does not respond; it reads the newest snapshots.
"""

from typing import Annotated

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from loraplex.engine.client import EngineClient
from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.messages import EngineStats
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.web.planes import OperatorRequest, requires_operator
from loraplex.platform.web.responses import ApiResponse, ResponseModel, documented, respond

Operator = Annotated[OperatorRequest, requires_operator()]

router = APIRouter()


class ModelFacts(ResponseModel):
    """`digest`: of configuration and weights, to which adapters are bound. `system_fingerprint`: as in responses."""

    served_name: str
    digest: str = Field(validation_alias="model_digest")
    system_fingerprint: str | None
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int


class DeviceTier(ResponseModel):
    """Adapters on the device. `adapters`: digests, the least recently used first."""

    adapters: list[str] = Field(validation_alias="resident_adapters")
    pinned: int = Field(validation_alias="pinned_adapters")
    bytes: int = Field(validation_alias="adapter_bytes")
    budget_bytes: int = Field(validation_alias="adapter_budget_bytes")
    loads: int = Field(validation_alias="adapter_loads")
    load_failures: int = Field(validation_alias="adapter_load_failures")
    evictions: int = Field(validation_alias="adapter_evictions")


class HostTier(ResponseModel):
    bytes: int = Field(validation_alias="adapter_host_bytes")
    hits: int = Field(validation_alias="adapter_host_hits")


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
    prefix_queries: int = Field(validation_alias="prefix_cache_queries")
    prefix_hits: int = Field(validation_alias="prefix_cache_hits")


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


@router.get("/engine", responses=documented(response=EnginesDocument))
async def show_engines(request: Operator) -> Response:
    engine, served_name = request.dependencies.engine, request.dependencies.served_model_name
    info = engine.info()
    model = ModelFacts.model_validate({**msgspec.structs.asdict(info), "served_name": served_name})
    engines = await engines_of(engine, info.block_size)
    return respond(ApiResponse(200, EnginesDocument(model=model, engines=engines)))


async def engines_of(engine: EngineClient, block_size: int) -> list[EngineDocument]:
    """Describe every engine of a pool by its newest snapshot, or the single engine by its current state."""
    if isinstance(engine, EnginePool):
        return [
            document(each.last_stats if each.connected else None, block_size, each.restarts, each.failure)
            for each in engine.observed().values()
        ]
    try:
        return [document(await engine.stats(), block_size)]
    except EngineUnavailable as error:
        return [document(None, block_size, failure=str(error))]


def document(
    stats: EngineStats | None, block_size: int, restarts: int = 0, failure: str | None = None
) -> EngineDocument:
    """Describe an engine by its statistics; None while it does not respond."""
    given = None if stats is None else {**msgspec.structs.asdict(stats), "block_size": block_size}
    return EngineDocument(
        connected=stats is not None,
        draining=stats is not None and stats.draining,
        restarts=restarts,
        failure=failure,
        residency=None if given is None else Residency.model_validate({"device": given, "host": given}),
        queues=None if given is None else Queues.model_validate(given),
        kv=None if given is None else KvCache.model_validate(given),
    )
