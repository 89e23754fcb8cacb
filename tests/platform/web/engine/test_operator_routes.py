"""`GET /operator/v1/engine`: the figures of engines, also of one that does not respond."""

from typing import Any

import pytest
from tests.platform.engines.managed_engine import Managed

from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.fake_engine import FakeEngine
from loraplex.engine.messages import EngineStats
from loraplex.platform.engines.pool import EnginePool
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
    well.last_stats, lost.connected, lost.failure = STATS, False, "it keeps failing"
    first, second = await engines_of(EnginePool([well, lost]), 16)
    assert first.residency is not None and first.queues is not None and first.kv is not None
    assert first.residency.device.adapters == ["a" * 64]
    assert (first.residency.device.bytes, first.residency.host.bytes) == (10, 20)
    assert (first.queues.running, first.queues.waiting) == (3, 2)
    assert (first.kv.free_blocks, first.kv.cached_blocks, first.kv.prefix_hits) == (5, 3, 7)
    assert (second.connected, second.failure, second.kv) == (False, "it keeps failing", None)


async def test_an_engine_that_does_not_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()

    async def silent() -> EngineStats:
        raise EngineUnavailable("the engine does not answer")

    monkeypatch.setattr(engine, "stats", silent)
    (document,) = await engines_of(engine, 16)
    assert (document.connected, document.failure) == (False, "the engine does not answer")
