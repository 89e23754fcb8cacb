"""`/operator/v1/engine` and `/engines`: the model, and of each engine its adapters, queues and KV cache; engines that come and go.

Invariant: the route does not wait for an engine of the pool that does not respond; it reads the newest snapshots.
"""

from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from loraplex.engine.client import EngineClient
from loraplex.platform.errors import EngineNotFound
from loraplex.platform.web.engine import use_cases
from loraplex.platform.web.engine.queries import EngineState, EngineStateName, engine_states
from loraplex.platform.web.openapi import described
from loraplex.platform.web.planes import OperatorRequest, requires_operator
from loraplex.platform.web.request_bodies import RequestModel, request_model
from loraplex.platform.web.responses import ApiResponse, ResponseModel, documented, respond
from loraplex.tenants.unit_of_work import UnitOfWork

Operator = Annotated[OperatorRequest, requires_operator()]
MAX_ENGINE: Final = 999_999
"""The largest number of an engine that is asked for."""

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
    """The parts are null while the engine does not respond. `failure`: why it does not run, if known.

    `number` stays with the engine. `address` is its socket, `device` what it has for itself, if this server started it, and
    `hardware` the name of that, such as `NVIDIA H100 80GB HBM3` or `CPU`.
    `open_requests`: those of this gateway. `starting`: it has never answered this gateway.
    """

    number: int
    address: str | None
    device: str | None
    hardware: str | None
    state: EngineStateName
    open_requests: int
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


class NewEngine(RequestModel):
    """`address`: of an engine of another process, for a gateway; a server that starts its engines takes none. `replaces`: the
    number of one that leaves soon.
    """

    address: str | None = Field(default=None, min_length=1, max_length=200)
    replaces: int | None = Field(default=None, ge=0, le=MAX_ENGINE)


class EngineDrain(RequestModel):
    """`grace_s`: how long open requests may go on; by default the setting `drain_s`. `force`: also where no other engine takes
    requests.
    """

    grace_s: float | None = Field(default=None, ge=0, le=86_400)
    force: bool = False


@router.get("/engine", responses=documented(response=EnginesDocument))
async def show_engines(request: Operator) -> Response:
    engine, served_name = request.dependencies.engine, request.dependencies.served_model_name
    info = engine.info()
    model = ModelFacts.model_validate({**msgspec.structs.asdict(info), "served_name": served_name})
    engines = await engines_of(engine, info.block_size)
    return respond(ApiResponse(200, EnginesDocument(model=model, engines=engines)))


@router.post(
    "/engines",
    status_code=202,
    responses=documented(409, 422, response=EngineDocument, status=202),
    openapi_extra=described(NewEngine, optional_body=True, repeatable=True),
)
async def add_engine(
    request: Operator, body: Annotated[NewEngine, request_model(NewEngine, optional=True)]
) -> Response:
    return await request.run(_added, request.dependencies.engine, body)


@router.post(
    "/engines/{number}/drain",
    status_code=202,
    responses=documented(409, 422, response=EngineDocument, status=202),
    openapi_extra=described(EngineDrain, optional_body=True, repeatable=True),
)
async def drain_engine(
    request: Operator, number: str, body: Annotated[EngineDrain, request_model(EngineDrain, optional=True)]
) -> Response:
    return await request.run(_drained, request.dependencies.engine, engine_number(number), body)


def engine_number(text: str) -> int:
    """Parse the number of a path. Raises `EngineNotFound`."""
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_ENGINE))):
        raise EngineNotFound(f"There is no engine {text[:40]}.")
    return int(text)


async def _added(uow: UnitOfWork, engine: EngineClient, body: NewEngine) -> EngineDocument:
    return await _one(engine, await use_cases.add(uow, engine, body.address, body.replaces))


async def _drained(uow: UnitOfWork, engine: EngineClient, number: int, body: EngineDrain) -> EngineDocument:
    return await _one(engine, await use_cases.drain(uow, engine, number, body.grace_s, force=body.force))


async def _one(engine: EngineClient, number: int) -> EngineDocument:
    states = await engine_states(engine, datetime.now(UTC))
    return _document(next(state for state in states if state.number == number), engine.info().block_size)


async def engines_of(engine: EngineClient, block_size: int) -> list[EngineDocument]:
    """Describe every engine of a pool by its newest snapshot, or the single engine by its current state."""
    return [_document(state, block_size) for state in await engine_states(engine, datetime.now(UTC))]


def _document(state: EngineState, block_size: int) -> EngineDocument:
    stats = state.stats if state.connected else None
    given = None if stats is None else {**msgspec.structs.asdict(stats), "block_size": block_size}
    return EngineDocument(
        number=state.number,
        address=state.address,
        device=state.device,
        hardware=state.hardware,
        state=state.state,
        open_requests=state.open_requests,
        connected=state.connected,
        draining=state.state == "draining",
        restarts=state.restarts,
        failure=state.failure,
        residency=None if given is None else Residency.model_validate({"device": given, "host": given}),
        queues=None if given is None else Queues.model_validate(given),
        kv=None if given is None else KvCache.model_validate(given),
    )
