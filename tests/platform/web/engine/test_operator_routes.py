"""`GET /operator/v1/engine`: the figures of engines, also of one that does not respond."""

from typing import Any

import pytest
from tests.platform.engines.managed_engine import Managed

from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.fake_engine import FakeEngine
from loraplex.engine.messages import EngineStats
from loraplex.platform.engines.pool import EnginePool
from loraplex.platform.errors import EngineNotAdded
from loraplex.platform.web.engine.operator_routes import engines_of

STATS = EngineStats(
    resident_adapters=["a" * 64],
    adapter_bytes=10,
    adapter_host_bytes=20,
    running=3,
    waiting=2,
    total_blocks=9,
    free_blocks=5,
    cached_blocks=3,
    referenced_blocks=1,
    prefix_cache_hits=7,
)


async def test_one_engine_over_http(operator: Any) -> None:
    response = await operator.get("/engine")
    document = response.json()
    assert response.status_code == 200
    assert (document["model"]["served_name"], document["model"]["digest"]) == ("demo/base", "0" * 64)
    assert document["model"]["system_fingerprint"] == "fp_fa4efa4efa4efa4e"
    (engine,) = document["engines"]
    assert engine["connected"] and engine["queues"]["running"] == 0 and engine["kv"]["block_size"] == 16


async def test_every_engine_of_a_pool_by_tier_queue_and_cache() -> None:
    well, lost = Managed(), Managed()
    well.last_stats = well.known_stats = STATS
    well.device, lost.connected, lost.failure = "GPU 3", False, "it keeps failing"
    first, second = await engines_of(EnginePool([well, lost]), 16)
    assert first.residency is not None and first.queues is not None and first.kv is not None
    assert first.residency.device.adapters == ["a" * 64]
    assert (first.residency.device.bytes, first.residency.host.bytes) == (10, 20)
    assert (first.queues.running, first.queues.waiting) == (3, 2)
    assert (first.kv.free_blocks, first.kv.cached_blocks, first.kv.prefix_hits) == (5, 3, 7)
    assert (first.number, first.device, first.state, first.open_requests) == (0, "GPU 3", "up", 0)
    assert (second.connected, second.failure, second.kv) == (False, "it keeps failing", None)
    assert (second.number, second.state) == (1, "down")


async def test_an_engine_that_does_not_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()

    async def silent() -> EngineStats:
        raise EngineUnavailable("the engine does not answer")

    monkeypatch.setattr(engine, "stats", silent)
    (document,) = await engines_of(engine, 16)
    assert (document.connected, document.failure) == (False, "the engine does not answer")


class Fleet:
    """Adds managed engines, and lets those that drain say so."""

    def __init__(self, pool: EnginePool) -> None:
        self.pool = pool
        self.drained: list[tuple[int, float | None]] = []

    async def add(self, address: str | None, replaces: int | None) -> int:
        if address == "ipc:///taken":
            raise EngineNotAdded("it is attached already", "address")
        added = Managed()
        added.connected, added.device = False, f"GPU {replaces}"
        return self.pool.add(added)

    async def drain(self, number: int, grace_s: float | None) -> None:
        self.drained.append((number, grace_s))
        engine = self.pool.engines[number]
        assert isinstance(engine, Managed)
        engine.last_stats = engine.known_stats = EngineStats(draining=True)


@pytest.fixture
def fleet(operator: Any) -> Fleet:
    pool = EnginePool([Managed(), Managed()])
    pool.fleet = fleet = Fleet(pool)
    object.__setattr__(operator.gateway.app.state.planes.dependencies, "engine", pool)
    return fleet


async def test_engines_are_added_and_drained_and_both_are_audited(operator: Any, fleet: Fleet) -> None:
    added = await operator.post("/engines", {"replaces": 1}, **{"idempotency-key": "one"})
    again = await operator.post("/engines", {"replaces": 1}, **{"idempotency-key": "one"})
    assert added.status_code == again.status_code == 202 and added.json() == again.json()
    found = {name: added.json()[name] for name in ("number", "state", "device", "kv")}
    assert found == {"number": 2, "state": "starting", "device": "GPU 1", "kv": None}
    drained = await operator.post("/engines/0/drain", {"grace_s": 2.5})
    assert drained.status_code == 202 and drained.json()["state"] == "draining"
    assert fleet.drained == [(0, 2.5)]
    listed = (await operator.get("/engine")).json()["engines"]
    states = [(each["number"], each["state"]) for each in listed]
    assert states == [(0, "draining"), (1, "up"), (2, "starting")]
    entries = (await operator.get("/audit")).json()["data"]
    assert [(each["action"], each["target"]) for each in entries[:2]] == [
        ("engine.drain", "engines/0"),
        ("engine.add", "engines/2"),
    ]
    assert entries[0]["after"] == {"grace_s": 2.5, "address": "ipc:///managed", "device": None}


async def test_what_is_refused_says_why_and_changes_nothing(operator: Any, fleet: Fleet) -> None:
    await operator.post("/engines/0/drain")
    for path, body, status, code in (
        ("/engines/1/drain", None, 409, "last_engine"),
        ("/engines/7/drain", None, 404, "engine_not_found"),
        ("/engines/x/drain", None, 404, "engine_not_found"),
        ("/engines/1/drain", {"grace_s": -1}, 400, "invalid_value"),
        ("/engines", {"address": "ipc:///taken"}, 409, "engine_not_added"),
    ):
        refused = await operator.post(path, body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code), refused.text
    assert fleet.drained == [(0, None)]
    assert (await operator.post("/engines/1/drain", {"force": True})).status_code == 202
    object.__setattr__(operator.gateway.app.state.planes.dependencies, "engine", FakeEngine())
    assert (await operator.post("/engines")).json()["error"]["code"] == "engine_not_added"
