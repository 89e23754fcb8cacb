"""Serve's hooks of the router, without a cluster: what it counts of a request, which replicas it leaves out, whose prefixes it keeps."""

import asyncio
import time
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID
from ray.serve.request_router import ReplicaID, RequestRouter

from loraplex.engine.fake_engine import DEFAULT_INFO
from loraplex.engine.messages import EngineStats
from loraplex.platform.engines.prefix_index import prompt_prefixes
from loraplex.platform.ray import router as router_module
from loraplex.platform.ray.messages import WAITED, Placing, ReplicaReport, encode
from loraplex.platform.ray.replica_directory import directory_of
from loraplex.platform.ray.router import CONTROL_CALLS, REPORT, PlacementRouter

DEPLOYMENT = DeploymentID(name="replica", app_name="app of a test")
NAMESPACE, DIGEST = b"n" * 32, "a" * 64
PLACES = 50


def named(name: str) -> ReplicaID:
    return ReplicaID(unique_id=name, deployment_id=DEPLOYMENT)


def replica(name: str, stats: EngineStats | None = None, *, down: bool = False) -> Any:
    report = ReplicaReport(
        info=DEFAULT_INFO, stats=None if down else stats or EngineStats(), at=datetime.now(UTC)
    )
    return SimpleNamespace(
        replica_id=named(name),
        get_queue_len=full,
        routing_stats={REPORT: encode(report)},
        max_ongoing_requests=CONTROL_CALLS + PLACES,
    )


async def full(deadline_s: float) -> int:
    return PLACES


def pending(request_id: str, **fields: Any) -> Any:
    placing = Placing(namespace=NAMESPACE, **{"adapter": DIGEST, **fields})
    return SimpleNamespace(
        args=(b"", encode(placing)),
        metadata=SimpleNamespace(internal_request_id=request_id),
        routing_context=SimpleNamespace(should_backoff=False),
        kwargs={WAITED: 0.0},
    )


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> PlacementRouter:
    for name in ("update_replicas", "on_replica_actor_died", "on_new_queue_len_info"):
        monkeypatch.setattr(RequestRouter, name, lambda *_: None)
    made = object.__new__(PlacementRouter)
    made._deployment_id = DEPLOYMENT
    made.initialize_state()
    return made


async def order(router: PlacementRouter, replicas: list[Any], request: Any) -> list[str]:
    ranks = await router.choose_replicas(replicas, request)
    return [each.replica_id.unique_id for (each,) in ranks]


def open_requests(router: PlacementRouter, names: str) -> list[int]:
    return [router._index.open_requests(name) for name in names]


async def test_a_request_counts_where_it_is_from_its_choice_to_its_end(
    router: PlacementRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = [replica("a"), replica("b")]
    router.update_replicas(replicas)
    first, second = await order(router, replicas, pending("1"))
    assert open_requests(router, first + second) == [1, 0]
    router.on_request_routed(pending("1"), named(second), None)
    assert open_requests(router, first + second) == [0, 1], "the first one refused it"
    router.on_request_completed(named(second), "1")
    router.on_request_completed(named(second), "unknown")
    assert open_requests(router, "ab") == [0, 0]
    await order(router, replicas, pending("cancelled"))
    monkeypatch.setattr(router_module, "CHOSEN_S", -1.0)
    assert sum(open_requests(router, "ab")) == 1
    await order(router, replicas, pending("2"))
    assert sum(open_requests(router, "ab")) == 1
    router.on_new_queue_len_info(named("a"), 7)
    assert open_requests(router, "a") == [7]
    monkeypatch.setattr(router_module, "CHOSEN_S", 60.0)
    assert "a" in await order(router, replicas, pending("3"))
    for name in "ab":
        router.on_new_queue_len_info(named(name), PLACES)
    assert await order(router, replicas, pending("4")) == [], "no replica has a place"


async def test_streams_leave_places_for_aborts_and_a_full_fleet_is_asked_again_later(
    router: PlacementRouter,
) -> None:
    replicas = [replica("a"), replica("b")]
    router.update_replicas(replicas)
    router.on_new_queue_len_info(named("a"), PLACES)
    assert await order(router, replicas, pending("1")) == ["b"]
    router.on_new_queue_len_info(named("b"), PLACES)
    request = pending("2")
    assert await order(router, replicas, request) == []
    assert request.routing_context.should_backoff
    router.on_new_queue_len_info(named("a"), PLACES - 1)
    assert await order(router, replicas, pending("3")) == ["a"]


async def test_a_replica_that_stays_full_is_asked_less_and_less_often(
    router: PlacementRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    asked: list[float] = []
    place: list[int] = []
    monkeypatch.setattr(router_module, "time", SimpleNamespace(monotonic=lambda: now))
    replicas = [replica("a")]

    async def count(deadline_s: float) -> int:
        asked.append(now)
        return PLACES - len(place)

    replicas[0].get_queue_len = count
    router.update_replicas(replicas)
    router.on_new_queue_len_info(named("a"), PLACES)
    for step in range(1000):  # ten seconds, ten requests
        now = step / 100
        assert await order(router, replicas, pending(f"{step % 10}")) == []
        await asyncio.sleep(0)
    assert len(asked) <= 17, "as many as one every 0.8 s, and the first ones"
    place.append(1)
    now += router_module.MAX_RECOUNT_S
    await order(router, replicas, pending("1"))
    await asyncio.sleep(0)
    assert await order(router, replicas, pending("1")) == ["a"]
    router.on_request_routed(pending("1"), named("a"), None)
    asked.clear()
    place.clear()
    await order(router, replicas, pending("2"))
    await asyncio.sleep(0)
    assert asked == [now], "one that has had a place is asked at once"


async def test_a_full_replica_that_does_not_answer_is_not_waited_for(
    router: PlacementRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_module, "MAX_RECOUNT_S", 0.02)
    replicas = [replica("a")]

    async def never(deadline_s: float) -> None:
        await asyncio.Event().wait()

    replicas[0].get_queue_len = never
    router.update_replicas(replicas)
    router.on_new_queue_len_info(named("a"), PLACES)
    assert await order(router, replicas, pending("1")) == []
    (asking,) = router._asking
    async with asyncio.timeout(20):
        await asking
    assert not router._asking


async def test_the_replica_learns_how_long_a_request_has_waited(router: PlacementRouter) -> None:
    replicas = [replica("a")]
    router.update_replicas(replicas)
    request = pending("1", since=time.monotonic() - 30.0)
    await order(router, replicas, request)
    assert 30.0 <= request.kwargs[WAITED] < 60.0
    probe = pending("2")
    probe.kwargs.clear()
    await order(router, replicas, probe)
    assert probe.kwargs == {}


async def test_replicas_without_an_engine_are_left_out_while_another_has_one(router: PlacementRouter) -> None:
    replicas = [replica("a"), replica("b", EngineStats(draining=True)), replica("c", down=True)]
    router.update_replicas(replicas)
    assert await order(router, replicas, pending("1")) == ["a"]
    assert await order(router, replicas, pending("2", avoid=["a"])) == ["b", "c"]
    assert set(directory_of(DEPLOYMENT.app_name).reports) == {"a", "b", "c"}
    router.on_replica_actor_died(named("a"))
    assert await order(router, replicas[1:], pending("3")) == ["c", "b"]
    router.update_replicas([replica("b")])
    assert await order(router, [replica("b")], pending("4")) == ["b"]
    assert set(directory_of(DEPLOYMENT.app_name).reports) == {"b"}


async def test_without_a_ranked_replica_the_one_with_the_fewest_requests_is_first(
    router: PlacementRouter,
) -> None:
    replicas = [replica(name, down=True) for name in "abc"]
    router.update_replicas(replicas)
    chosen = [(await order(router, replicas, pending(f"{number}")))[0] for number in range(6)]
    assert sorted(chosen) == ["a", "a", "b", "b", "c", "c"]


async def test_a_prompt_follows_its_prefix_within_its_tenant(router: PlacementRouter) -> None:
    replicas = [replica(name) for name in "abcdefgh"]
    router.update_replicas(replicas)
    prefixes = prompt_prefixes(NAMESPACE, None, b"", range(128))
    fields: dict[str, Any] = {"adapter": None, "prefixes": prefixes}
    home, *others = await order(router, replicas, pending("1", **fields))
    away = others[0]
    for number in range(40):
        router.on_request_routed(pending(f"{number}", **fields), named(away), None)
        router.on_request_completed(named(away), f"{number}")
    assert router._index._prefixes.shares(NAMESPACE, prefixes) == {home: 1.0, away: 1.0}
    assert router._index._prefixes.shares(b"o" * 32, prefixes) == {}
