"""Two tenants over HTTP: one that fills the gateway, and one whose requests are served meanwhile."""

import asyncio
from collections import Counter
from typing import Any

import httpx
import pytest

from loraplex.engine.fake_engine import FakeEngine, FakeScript
from loraplex.platform.inference.dependencies import ServingConfig

MODEL = "demo/base"
ONE: Any = {"model": MODEL, "prompt": [[1]], "max_tokens": 1}
SLOW = FakeScript(start_delay_s=0.2)


def client_of(gateway: Any, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=gateway.url,
        headers={"authorization": f"Bearer {key}"},
        limits=httpx.Limits(max_connections=64),
        timeout=120,
    )


@pytest.mark.parametrize(("prompts", "n"), [(64, 1), (4, 16)])
async def test_a_tenant_that_floods_the_gateway_leaves_room_to_another(
    start_gateway: Any, prompts: int, n: int
) -> None:
    """40 requests of 64 sequences at a time, where 256 may be in progress."""
    gateway = await start_gateway(SLOW, ServingConfig(max_in_flight=256, key_cache_s=60.0))
    quiet = await gateway.tenant("quiet")
    flood, served = Counter[int](), Counter[int]()
    body = ONE | {"prompt": [[1]] * prompts, "n": n}

    async def attack(http: httpx.AsyncClient) -> None:
        while served.total() < 5:
            flood[(await http.post("/v1/completions", json=body)).status_code] += 1
            # Client and server share this event loop.
            await asyncio.sleep(0.2)

    async with client_of(gateway, gateway.key) as loud, client_of(gateway, quiet) as http:
        attackers = [asyncio.create_task(attack(loud)) for _ in range(40)]
        async with asyncio.timeout(60):
            while not flood[429]:
                await asyncio.sleep(0.01)
        for _ in range(5):
            served[(await http.post("/v1/completions", json=ONE)).status_code] += 1
        await asyncio.gather(*attackers)
    assert served == {200: 5} and flood.keys() == {200, 429}


async def test_the_newest_request_of_the_largest_tenant_gives_way(
    start_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, pause = asyncio.Event(), FakeEngine._pause

    async def until_go_on(engine: FakeEngine, seconds: float, aborted: asyncio.Event) -> None:
        while seconds and not go_on.is_set() and not aborted.is_set():
            await asyncio.sleep(0.005)
        await pause(engine, 0.0, aborted)

    monkeypatch.setattr(FakeEngine, "_pause", until_go_on)
    gateway = await start_gateway(
        FakeScript(start_delay_s=1.0, prefilled_tokens=1), ServingConfig(max_in_flight=4, key_cache_s=60.0)
    )
    other, third = await gateway.tenant("other"), await gateway.tenant("third")
    async with (
        client_of(gateway, gateway.key) as acme,
        client_of(gateway, other) as others,
        client_of(gateway, third) as thirds,
    ):
        asked = []
        for http in (acme, acme, others, others):
            asked.append(asyncio.create_task(http.post("/v1/completions", json=ONE)))
            async with asyncio.timeout(60):
                while gateway.engine.running < len(asked):
                    await asyncio.sleep(0.005)
        asking = asyncio.create_task(thirds.post("/v1/completions", json=ONE))
        async with asyncio.timeout(60):
            while not asked[1].done():
                await asyncio.sleep(0.005)
        go_on.set()
        small, *answers = await asyncio.gather(asking, *asked)
    assert small.status_code == 200
    assert [each.status_code for each in answers] == [200, 503, 200, 200]
    refused = answers[1]
    assert refused.json()["error"]["code"] == "overloaded" and refused.headers["retry-after"] == "1"
    # The engine had computed its prompt, which nevertheless costs nothing.
    assert len(gateway.admissions.cancelled) == 1
    assert [usage.outcome for _, usage in gateway.admissions.settled] == ["completed"] * 4


async def test_a_request_that_never_fits_names_n(start_gateway: Any) -> None:
    gateway = await start_gateway(limits=ServingConfig(max_in_flight=64, key_cache_s=60.0))
    response = await gateway.post("/v1/completions", ONE | {"prompt": [[1]] * 3, "n": 11})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "n") and "at most 32" in error["message"]


async def test_adapters_of_a_busy_tenant_are_resolved_a_few_at_a_time(
    start_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start_gateway(limits=ServingConfig(key_cache_s=60.0))
    quiet, end, resolving = await gateway.tenant("quiet"), asyncio.Event(), Counter[str]()

    async def find(resolver: Any, model: str) -> None:
        resolving[model] += 1
        if model == "pirate":
            await end.wait()

    monkeypatch.setattr("loraplex.tenants.registry.resolution.ModelResolver.find", find)
    async with client_of(gateway, gateway.key) as loud, client_of(gateway, quiet) as http:
        waiting = [
            asyncio.create_task(loud.post("/v1/completions", json=ONE | {"model": "pirate"}))
            for _ in range(20)
        ]
        while resolving["pirate"] < 4:
            await asyncio.sleep(0.01)
        answer = await http.post("/v1/completions", json=ONE | {"model": "parrot"})
        assert answer.status_code == 404 and resolving == {"pirate": 4, "parrot": 1}
        end.set()
        assert {each.status_code for each in await asyncio.gather(*waiting)} == {404}
