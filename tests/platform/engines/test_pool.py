"""Routing over several engines: stable homes, spill under load, failover, aborts that find their request."""

import asyncio
from collections import Counter

import msgspec
import pytest
from tests.platform.engines.managed_engine import Managed

from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.fake_engine import DEFAULT_INFO, FakeScript
from loraplex.engine.messages import (
    AdapterRef,
    EngineInfo,
    EngineRequest,
    EngineStats,
    Failed,
    Finished,
    Started,
)
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.engines import pool as pool_module
from loraplex.platform.engines.pool import NO_STATS, EnginePool, ManagedEngine
from loraplex.platform.startup_errors import EngineStartFailed


def request(name: str, adapter: str | None = None) -> EngineRequest:
    namespace = name.encode().ljust(32, b".")
    return EngineRequest(
        request_id=name,
        namespace=namespace,
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=3),
        adapter=AdapterRef(namespace=namespace, digest=adapter, blob_path="/b") if adapter else None,
    )


def home_of(pool: EnginePool, engine_request: EngineRequest) -> ManagedEngine:
    return pool.home(engine_request.namespace, engine_request.adapter)


def test_homes_are_stable_and_spread() -> None:
    pool = EnginePool([Managed() for _ in range(4)])
    homes = {f"t{i}": home_of(pool, request(f"t{i}", "a" * 64)) for i in range(400)}
    counts = Counter(id(engine) for engine in homes.values())
    assert len(counts) == 4 and min(counts.values()) > 60
    assert all(home_of(pool, request(name, "a" * 64)) is home for name, home in homes.items())


def test_a_lost_engine_moves_only_its_own() -> None:
    engines = [Managed() for _ in range(3)]
    pool = EnginePool(engines)
    before = {f"t{i}": home_of(pool, request(f"t{i}")) for i in range(90)}
    engines[0].connected = False
    after = {name: home_of(pool, request(name)) for name in before}
    assert engines[0] not in after.values()
    assert all(after[name] is home for name, home in before.items() if home is not engines[0])
    engines[1].last_stats = EngineStats(draining=True)
    assert {home_of(pool, request(name)) for name in before} == {engines[2]}


def test_a_loaded_home_spills() -> None:
    engines = [Managed(), Managed()]
    pool = EnginePool(engines)
    home = next(engine for engine in engines if engine is home_of(pool, request("t")))
    home.last_stats = EngineStats(running=50, max_running=64)
    assert home_of(pool, request("t")) is not home


def test_an_engine_that_has_the_adapter_is_preferred_until_another_report_says_otherwise() -> None:
    engines = [Managed() for _ in range(3)]
    pool = EnginePool(engines)
    engine_request = request("t", "a" * 64)
    assert engine_request.adapter is not None
    home = home_of(pool, engine_request)
    other = next(engine for engine in engines if engine is not home)
    other.last_stats = EngineStats(max_running=8, device_adapters=[engine_request.adapter.key])
    assert home_of(pool, engine_request) is other
    other.last_stats = EngineStats(max_running=8)
    assert home_of(pool, engine_request) is home


async def test_an_adapter_is_probed_where_its_requests_go() -> None:
    engines = [Managed() for _ in range(3)]
    pool = EnginePool(engines)
    for number in range(20):
        engine_request = request(f"t{number}", "a" * 64)
        assert engine_request.adapter is not None
        assert (await pool.probe(engine_request.adapter)).digest == "a" * 64
        home = next(engine for engine in engines if engine is home_of(pool, engine_request))
        assert home.probed[-1] is engine_request.adapter


async def test_an_adapter_of_two_deaths_fails_its_probe_without_an_engine() -> None:
    engine = Managed()
    pool = EnginePool([engine])
    adapter = request("t", "a" * 64).adapter
    assert adapter is not None
    pool.poison_memory.record_death([adapter])
    assert (await pool.probe(adapter)).code is None
    for _ in range(2):
        pool.poison_memory.record_death([adapter])
    report = await pool.probe(adapter)
    assert (report.digest, report.code) == (adapter.digest, "adapter_quarantined")
    assert "engines ended while they ran this adapter" in report.message
    assert engine.probed == [adapter]


async def test_requests_and_aborts_reach_their_engine() -> None:
    engines = [Managed(FakeScript(token_interval_s=5.0)), Managed(FakeScript(token_interval_s=5.0))]
    pool = EnginePool(engines)

    async def run() -> object:
        return [event async for event in pool.submit(request("t"))][-1]

    task = asyncio.create_task(run())
    await asyncio.sleep(0.02)
    assert pool.open_requests == 1
    await pool.abort("t")
    last = await task
    assert isinstance(last, Finished) and last.reason == "abort"
    assert sum(engine.aborts for engine in engines) == 1
    await pool.abort("unknown")


@pytest.mark.parametrize("count", [1, 2])
async def test_the_start_of_a_request_names_its_engine(count: int) -> None:
    engines = [Managed() for _ in range(count)]
    pool, seen = EnginePool(engines), set()
    for number in range(12):
        (started,) = [
            event async for event in pool.submit(request(f"t{number}")) if isinstance(event, Started)
        ]
        assert started.engine is not None
        assert engines[int(started.engine)].requests[-1].request_id == f"t{number}"
        seen.add(started.engine)
    assert len(seen) == count


async def test_closing_the_stream_reaches_the_engine_at_once() -> None:
    engine = Managed(FakeScript(token_interval_s=5.0))
    stream = EnginePool([engine]).submit(request("t"))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert (engine.running, engine.aborts) == (0, 1)


async def test_without_engines() -> None:
    engine = Managed()
    engine.connected = False
    with pytest.raises(EngineUnavailable):
        await EnginePool([engine]).stats()
    pool = EnginePool()
    with pytest.raises(EngineUnavailable):
        pool.info()
    with pytest.raises(EngineUnavailable):
        pool.home(b"n", None)
    events = [event async for event in pool.submit(request("t"))]
    assert isinstance(events[0], Failed) and events[0].code == "engine_unavailable"


async def test_engines_come_and_go_and_keep_their_numbers() -> None:
    engines = [Managed(FakeScript(token_interval_s=0.01)) for _ in range(3)]
    pool = EnginePool()
    ready = asyncio.create_task(pool.wait_ready())
    assert [pool.add(engine) for engine in engines] == [0, 1, 2]
    await asyncio.wait_for(ready, 60)
    long = msgspec.structs.replace(request("t"), sampling=SamplingParams(max_tokens=20))
    stream = pool.submit(long)
    await anext(stream)
    number = next(number for number, engine in pool.engines.items() if engine.open_requests)
    pool.remove(number)
    assert number not in pool.observed() and isinstance([event async for event in stream][-1], Finished)
    assert pool.add(Managed()) == 3 and pool.add(engines[number], number) == number
    assert list(pool.observed()) == [0, 1, 2, 3]
    for number in range(4):
        pool.remove(number)
    # What the gateway serves stays known, so that another engine may be added.
    assert not pool.engines and pool.info() == DEFAULT_INFO


async def test_a_prompt_goes_where_its_beginning_went() -> None:
    engines = [Managed() for _ in range(4)]
    pool = EnginePool(engines)
    adapters = [AdapterRef(namespace=b"n" * 32, digest=f"{i:064}", blob_path="/b") for i in range(8)]
    for engine in engines:
        keys = [adapter.key for adapter in adapters]
        engine.last_stats = EngineStats(max_running=64, device_adapters=keys)

    async def served(name: str, first_tokens: list[int], adapter: AdapterRef) -> Managed:
        asked = EngineRequest(
            request_id=name,
            namespace=b"n" * 32,
            prompt_token_ids=first_tokens + [7] * 64,
            sampling=SamplingParams(max_tokens=1),
            adapter=adapter,
        )
        assert isinstance([event async for event in pool.submit(asked)][-1], Finished)
        return next(engine for engine in engines if engine.requests and engine.requests[-1] is asked)

    for number, adapter in enumerate(adapters):
        home = await served(f"home{number}", [], adapter)
        other = next(engine for engine in engines if engine is not home)
        # While its home is full, a conversation begins elsewhere; it goes on there while the home has more to do.
        home.last_stats = msgspec.structs.replace(home.last_stats or NO_STATS, running=64)
        others = [engine for engine in engines if engine not in (home, other)]
        for each in others:
            each.connected = False
        assert await served(f"first{number}", list(range(256)), adapter) is other
        home.last_stats = msgspec.structs.replace(home.last_stats, running=16)
        for each in others:
            each.connected = True
        assert await served(f"next{number}", list(range(256)), adapter) is other
        home.last_stats = msgspec.structs.replace(home.last_stats, running=0)


async def test_a_request_that_a_draining_engine_refuses_goes_to_another() -> None:
    engines = [Managed(), Managed()]
    pool = EnginePool(engines)
    home = home_of(pool, request("t"))
    await home.drain()  # of which the pool has no report yet
    assert isinstance([event async for event in pool.submit(request("t"))][-1], Finished)
    for engine in engines:
        await engine.drain()
    events = [event async for event in pool.submit(request("t"))]
    assert [getattr(event, "code", None) for event in events] == ["engine_draining"]


def test_engines_of_different_models_are_refused() -> None:
    other = EngineInfo(
        **{f: getattr(DEFAULT_INFO, f) for f in DEFAULT_INFO.__struct_fields__} | {"model_digest": "1" * 64}
    )
    EnginePool([Managed(), Managed()]).require_one_model()
    with pytest.raises(EngineStartFailed, match="different models"):
        EnginePool([Managed(), Managed(FakeScript(info=other))]).require_one_model()


async def test_every_engine_forgets_a_tenant_and_a_failure_is_raised() -> None:
    class Lost(Managed):
        async def forget(self, namespace: bytes) -> None:
            raise EngineUnavailable("lost")

    well = [Managed(), Managed()]
    await EnginePool(well).forget(b"n")
    with pytest.raises(EngineUnavailable):
        await EnginePool([well[0], Lost(), well[1]]).forget(b"n")
    assert [engine.forgotten for engine in well] == [[b"n"] * 2] * 2


def test_observers_see_each_engine_behind_a_client_that_stands_for_several() -> None:
    client, first, third = Managed(), Managed(), Managed()
    assert EnginePool([client]).observed() == {0: client}
    assert EnginePool([client], observed=lambda: {0: first, 2: third}).observed() == {0: first, 2: third}


async def test_a_slow_engine_gets_its_share_and_all_where_it_is_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = [Managed() for _ in range(4)]
    for engine in engines:
        engine.last_stats = EngineStats(max_running=64)
    pool, shares = EnginePool(engines), {0: 1.0}
    monkeypatch.setattr(pool.slow_engines, "share", lambda number: shares.get(number, 1.0))
    monkeypatch.setattr(pool.slow_engines, "review", lambda numbers, wanted: True)

    async def served() -> list[int]:
        for engine in engines:
            engine.requests.clear()
        streams = [pool.submit(request(f"t{i}")) for i in range(200)]
        for stream in streams:
            await anext(stream)
        tenants = [
            [r for r in engine.requests if not r.request_id.startswith("trial-")] for engine in engines
        ]
        counts = [len(requests) for requests in tenants]
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]
        return counts

    assert min(await served()) > 30
    shares[0] = 0.25
    reduced = await served()
    assert 0 < reduced[0] < min(reduced[1:]) / 2
    shares[0] = 0.0
    assert (await served())[0] == 0
    for engine in engines[1:]:
        engine.connected = False
    assert (await served())[0] == 200


async def test_an_engine_without_requests_has_trials_until_it_has_recovered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "TRIAL_S", 0.01)
    engines = [Managed(), Managed()]
    pool, shares = EnginePool(engines), {0: 0.0}
    monkeypatch.setattr(pool.slow_engines, "share", lambda number: shares.get(number, 1.0))
    monkeypatch.setattr(pool.slow_engines, "review", lambda numbers, wanted: True)
    for name in ("a", "b"):
        assert [event async for event in pool.submit(request(name))]
    async with asyncio.timeout(10):
        while len(engines[0].requests) < 3:
            await asyncio.sleep(0.01)
    assert all(each.request_id.startswith("trial-") for each in engines[0].requests)
    assert {each.request_id for each in engines[1].requests} == {"a", "b"}
    shares[0] = 1.0
    await asyncio.sleep(0.05)
    served = len(engines[0].requests)
    await asyncio.sleep(0.05)
    assert len(engines[0].requests) == served
    shares[0] = 0.0
    assert [event async for event in pool.submit(request("c"))]
    await pool.drain()
    await asyncio.sleep(0.05)
    served = len(engines[0].requests)
    await asyncio.sleep(0.05)
    assert len(engines[0].requests) == served
