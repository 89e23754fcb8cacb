"""Use cases on the engines of this server, for operators: add one, drain one. Invariant: each writes one audit entry."""

from loraplex.engine.client import EngineClient
from loraplex.platform.engines.pool import EngineFleet, EnginePool, takes_requests
from loraplex.platform.errors import EngineNotAdded, EngineNotFound, LastEngine
from loraplex.tenants.unit_of_work import UnitOfWork


async def add(uow: UnitOfWork, engine: EngineClient, address: str | None, replaces: int | None) -> int:
    """Add an engine and return its number: that of another process at `address`, else a new one, on the device of `replaces`
    where two fit. Raises `EngineNotAdded`.
    """
    pool, fleet = _managed(engine)
    number = await fleet.add(address, replaces)
    added = pool.observed()[number]
    after = {"address": added.address, "device": added.device}
    await uow.audit.record("engine.add", f"engines/{number}", None, after)
    return number


async def drain(
    uow: UnitOfWork, engine: EngineClient, number: int, grace_s: float | None, *, force: bool
) -> int:
    """Let an engine take no more requests, and end after its open ones, or after `grace_s`; None: `drain_s`. Returns its number.

    Raises `EngineNotFound`, `EngineUnavailable`, and without `force` `LastEngine`.
    """
    pool, fleet = _managed(engine)
    drained = pool.observed().get(number)
    if drained is None:
        raise EngineNotFound(f"There is no engine {number}.")
    others = [each for key, each in pool.observed().items() if key != number and takes_requests(each)]
    if not others and not force:
        raise LastEngine(
            f"No other engine takes requests while engine {number} drains: add one first, or pass `force`."
        )
    after = {"grace_s": grace_s, "address": drained.address, "device": drained.device}
    await uow.audit.record("engine.drain", f"engines/{number}", None, after)
    await fleet.drain(number, grace_s)
    return number


def _managed(engine: EngineClient) -> tuple[EnginePool, EngineFleet]:
    if not isinstance(engine, EnginePool) or engine.fleet is None:
        raise EngineNotAdded(
            "The engines of this server are started and drained elsewhere, such as by Ray Serve."
        )
    return engine, engine.fleet
