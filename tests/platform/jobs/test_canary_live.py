"""A version that fails ten points more often than the one before gets no requests within a minute of its `min_requests`."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tests.platform.web.gateway import start_gateway
from tests.platform.web.limited_gateway import counting
from tests.platform.web.managed_tenant import ManagedTenant, managed
from tests.tenants.registry_records import digest

from loraplex.engine.fake_engine import FakeEngine, FakeScript
from loraplex.engine.messages import EngineRequest, Event, Failed
from loraplex.platform.jobs.canary_watch import CanaryWatch
from loraplex.tenants.database import Database

__all__ = ["start_gateway"]

FAILING = {digest(1): 0.02, digest(2): 0.12}
MIN_REQUESTS = 100
GUARD = {"max_failure_ratio": 1.5, "min_requests": MIN_REQUESTS}
WITHIN_S = 60.0
AT_ONCE = 8


class FailingEngine(FakeEngine):
    """Fails a share of each version's requests."""

    def __init__(self) -> None:
        super().__init__(FakeScript(answers=(("yes",),), token_interval_s=0.02))
        self._random = random.Random(4)

    async def submit(self, request: EngineRequest) -> AsyncIterator[Event]:
        assert request.adapter is not None
        fails = self._random.random() < FAILING[request.adapter.digest]
        async for event in super().submit(request):
            yield event
            if fails:
                yield Failed(request.request_id, "engine_error", "it fails")
                return


class Requests:
    """Sends requests to the alias, several at once, and counts the answers of each version."""

    def __init__(self, tenant: ManagedTenant) -> None:
        self.tenant = tenant
        self.statuses: dict[int, Counter[int]] = {1: Counter(), 2: Counter()}
        self.canary_ended: list[float] = []

    async def send(self, http: httpx.AsyncClient) -> None:
        body = {"model": "pirate", "prompt": "hello", "max_tokens": 1}
        while True:
            response = await http.post("/v1/completions", json=body)
            version = int(response.headers["x-loraplex-adapter"].partition("@")[2])
            self.statuses[version][response.status_code] += 1
            if version == 2:
                self.canary_ended.append(time.monotonic())


@pytest.mark.long
async def test_it_is_back_within_a_minute(start_gateway: Any, database: Database, valkey_url: str) -> None:
    async with counting(database, valkey_url) as admissions:
        gateway = await start_gateway(admissions=admissions, real_engine=FailingEngine())
        watch = CanaryWatch(database=database, publisher=admissions)
        jobs = [asyncio.create_task(each) for each in (admissions.maintenance.run(), watch.run())]
        async with managed(gateway, "boss") as tenant, asyncio.timeout(300):
            for number in (1, 2):
                await tenant.version(number)
            await tenant.put("production", {"version": 1}, None)
            split = [{"version": 1, "weight": 80}, {"version": 2, "weight": 20}]
            assert (await tenant.put("production", {"split": split, "guard": GUARD}, 1)).status_code == 200
            headers = {"authorization": f"Bearer {tenant.key}"}
            requests = Requests(tenant)
            async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=60) as http:
                jobs += [asyncio.create_task(requests.send(http)) for _ in range(AT_ONCE)]
                while (alias := (await tenant.http.get("adapters/pirate/aliases/production")).json())[
                    "guard"
                ]:
                    await asyncio.sleep(0.2)
                back = time.monotonic()
                seen = requests.statuses[2].total()
                await asyncio.sleep(5)
            assert alias["version"] == 1
            took_s = back - requests.canary_ended[MIN_REQUESTS - 1]
            print(f"back {took_s:.1f} s after min_requests: {requests.statuses}")
            assert took_s <= WITHIN_S
            assert requests.statuses[2].total() <= seen + AT_ONCE, "only what ran already"
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
