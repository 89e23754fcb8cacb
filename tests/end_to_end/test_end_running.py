"""Two gateways, each with an engine of its own: what ends on one ends on both, within 2 s and billed by what was delivered."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

import httpx
import msgspec
from tests.end_to_end.gateway_farm import MODEL, FarmPlan
from tests.end_to_end.lost_stores import external
from tests.end_to_end.priced_world import add_adapter
from tests.end_to_end.test_admission import as_writer, counted, farm, ready
from tests.end_to_end.test_never_lose import postmaster_of

from loraplex.engine.fake_engine import FakeScript
from loraplex.platform.datastores.embedded.servers import ServerPair
from loraplex.platform.datastores.migrations import upgrade
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.actors import Actor
from loraplex.tenants.administration import adapters, tenants, versions
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database
from loraplex.tenants.models import Quota
from loraplex.tenants.unit_of_work import unit_of_work

__all__ = ["external"]

OPERATOR = Actor("operator", "op")
INTERVAL_S = 0.02
LONG, SHORT = 4000, 100
"""Tokens of a request: of 80 s, and of 2."""
BOUND_S = 2.0
# The databases are up, and the machine may be busy.
PATIENCE_S = 60.0
ROWS = "SELECT client_request_id, outcome, completion_tokens FROM usage_records WHERE tenant_id = %s"
OPEN = "SELECT count(*) FROM reservations WHERE tenant_id = %s"


@dataclass
class Answer:
    """A request as its client sees it. `tokens`: delivered; of a stream each event has one."""

    id: str = ""
    status: int = 0
    tokens: int = 0
    code: str | None = None
    done: bool = False
    ended_at: float = 0.0


@dataclass
class Callers:
    """A tenant with three keys: two for requests, one that manages."""

    tenant_id: UUID
    keys: tuple[str, str, str]
    key_ids: tuple[str, str, str]


@dataclass
class World:
    """Both gateways, and all answers of the tenant so far."""

    urls: Sequence[str]
    client: httpx.AsyncClient
    database: Database
    operator: str
    callers: Callers
    answers: list[Answer] = field(default_factory=list)

    async def stream(self, gateway: int, key: int = 0, tokens: int = LONG, model: str = MODEL) -> "Running":
        """Start a request and wait for its first token."""
        answer, began = Answer(), asyncio.Event()
        self.answers.append(answer)
        body = {"model": model, "prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True, "stream": True}
        task = asyncio.create_task(self._read(gateway, key, body, answer, began))
        async with asyncio.timeout(PATIENCE_S):
            await began.wait()
        return Running(answer, task)

    async def whole(self, gateway: int, key: int = 0, tokens: int = LONG) -> "Running":
        """Start a request that is answered at its end."""
        answer = Answer()

        async def ask() -> None:
            body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True}
            response = await self.post(gateway, "/v1/completions", self.callers.keys[key], body)
            answer.status, answer.ended_at = response.status_code, time.monotonic()
            answer.code = response.json().get("error", {}).get("code")

        return Running(answer, asyncio.create_task(ask()))

    async def post(self, gateway: int, path: str, key: str, body: object = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return await self.client.post(f"{self.urls[gateway]}{path}", json=body, headers=headers)

    async def _read(self, gateway: int, key: int, body: object, answer: Answer, began: asyncio.Event) -> None:
        headers = {"authorization": f"Bearer {self.callers.keys[key]}"}
        url, event = f"{self.urls[gateway]}/v1/completions", ""
        async with self.client.stream("POST", url, json=body, headers=headers) as response:
            answer.id, answer.status = response.headers["x-request-id"], response.status_code
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("event: "):
                    event = line.removeprefix("event: ")
                elif line == "data: [DONE]":
                    answer.done = True
                elif line.startswith("data: "):
                    data = msgspec.json.decode(line.removeprefix("data: "))
                    if event:
                        answer.code = data["error"]["code"]
                    elif data["choices"][0]["finish_reason"] is None:
                        answer.tokens += 1
                        began.set()
        answer.ended_at = time.monotonic()


@dataclass
class Running:
    """A request that runs."""

    answer: Answer
    task: "asyncio.Task[None]"


async def ended(
    running: Sequence[Running], since: float, code: str, statuses: Sequence[int] = (200,)
) -> float:
    """Wait for the end of all; return after how many seconds the last ended. Each has the error, and no `[DONE]`."""
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(each.task for each in running))
    for each in running:
        assert (each.answer.code, each.answer.done) == (code, False), each
        assert each.answer.status in statuses
    seconds = max(each.answer.ended_at for each in running) - since
    assert seconds < BOUND_S, seconds
    return seconds


async def run_on(running: Sequence[Running]) -> None:
    """Wait for the end of all, which is that of their answers."""
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(each.task for each in running))
    for each in running:
        assert (each.answer.code, each.answer.done, each.answer.tokens) == (None, True, SHORT), each


async def made(database: Database, name: str) -> Callers:
    async with database.as_operator() as session:
        tenant = await TenantRepository(session).create(name)
        session.add(Quota(tenant_id=tenant.id, tokens_per_month=10**9, concurrent_requests=100))
        scopes = (["inference"], ["inference"], ["tenant:admin"])
        issued = [await KeyRepository(session).create(tenant.id, "key", each) for each in scopes]
    first, second, third = issued
    return Callers(
        tenant.id,
        (first.plaintext, second.plaintext, third.plaintext),
        (first.record.key_id, second.record.key_id, third.record.key_id),
    )


async def check_ledger(world: World, plan: FarmPlan, answers: Sequence[Answer], outcomes: set[str]) -> None:
    """Each answer is in the ledger once, with what was delivered of it, and nothing is reserved any more."""
    tenant_id, names = world.callers.tenant_id, {answer.id for answer in answers}
    async with await as_writer(plan.database_url) as connection, asyncio.timeout(PATIENCE_S):
        # A gateway that lost PostgreSQL writes later what its journal holds, reservations included.
        while True:
            is_open = await (await connection.execute(OPEN, [tenant_id])).fetchone() != (0,)
            rows = await (await connection.execute(ROWS, [tenant_id])).fetchall()
            if not is_open and names <= {name for name, _, _ in rows}:
                break
            await asyncio.sleep(0.05)
    found = {name: (outcome, tokens) for name, outcome, tokens in rows}
    for answer in answers:
        expected = "completed" if answer.done else "revoked"
        assert found[answer.id] == (expected, answer.tokens), (answer, found[answer.id])
    assert {outcome for _, outcome, _ in rows} == outcomes
    assert not any(use.reserved for use in await counted(world.database, plan, tenant_id))


Scenario = Callable[[World], Awaitable[str]]


async def suspension(world: World) -> str:
    path = f"/operator/v1/tenants/{world.callers.tenant_id}"
    kept = [await world.stream(gateway, tokens=SHORT) for gateway in (0, 1)]
    since = time.monotonic()
    response = await world.post(0, f"{path}/suspend", world.operator, {"end_running": False})
    assert response.status_code == 200, response.text
    await run_on(kept)
    ran_on_s = time.monotonic() - since
    response = await world.post(0, f"{path}/resume", world.operator)
    assert response.status_code == 200, response.text
    running = [await world.stream(gateway) for gateway in (0, 1) for _ in range(3)]
    whole = [await world.whole(gateway) for gateway in (0, 1)]
    await asyncio.sleep(0.5)
    since = time.monotonic()
    assert (await world.post(0, f"{path}/suspend", world.operator)).status_code == 200
    seconds = await ended([*running, *whole], since, "tenant_suspended", (200, 403))
    assert {each.answer.status for each in whole} == {403}
    # As soon as it is resumed, and while gateways still learn of its end.
    for _ in range(3):
        await world.post(0, f"{path}/suspend", world.operator)
        assert (await world.post(1, f"{path}/resume", world.operator)).status_code == 200
        resumed = [await world.stream(gateway, tokens=SHORT) for gateway in (0, 1)]
        await run_on(resumed)
    return f"suspended: {seconds:.2f} s; with end_running=false they ran on for {ran_on_s:.1f} s"


async def revocation(world: World) -> str:
    _, second, admin = world.callers.keys
    headers = {"authorization": f"Bearer {admin}"}
    url = f"{world.urls[0]}/tenant/v1/keys"
    others = [await world.stream(gateway, 1, SHORT) for gateway in (0, 1)]
    running = [await world.stream(gateway, 0) for gateway in (0, 1)]
    response = await world.client.delete(f"{url}/{world.callers.key_ids[0]}?end_running=no", headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "end_running")
    since = time.monotonic()
    response = await world.client.delete(
        f"{url}/{world.callers.key_ids[0]}?end_running=true", headers=headers
    )
    assert response.status_code == 204, response.text
    seconds = await ended(running, since, "api_key_revoked")
    assert not any(each.answer.done for each in others)
    response = await world.client.delete(f"{url}/{world.callers.key_ids[1]}", headers=headers)
    assert response.status_code == 204, response.text
    await run_on(others)
    assert (await world.post(1, "/v1/completions", second, {})).status_code == 401
    return f"key revoked: {seconds:.2f} s; the other key's ran on"


async def forced_deletion(world: World) -> str:
    tenant_id = world.callers.tenant_id
    async with world.database.as_operator() as session:
        for name in ("poet", "clerk"):
            for digit in "ab":
                await add_adapter(session, tenant_id, name, digit * 64)
    kept = [await world.stream(gateway, 2, SHORT, "clerk@1") for gateway in (0, 1)]
    first = [await world.stream(gateway, 2, model="poet@1") for gateway in (0, 1)]
    second = [await world.stream(gateway, 2, model="poet@2") for gateway in (0, 1)]
    since = time.monotonic()
    async with unit_of_work(world.database, OPERATOR, tenant_id, None) as uow:
        await versions.force_delete(uow, tenant_id, "poet", 1)
    seconds = [await ended(first, since, "adapter_deleted")]
    assert not any(each.task.done() for each in second)
    since = time.monotonic()
    async with unit_of_work(world.database, OPERATOR, tenant_id, None) as uow:
        await adapters.force_delete(uow, tenant_id, "poet")
        await adapters.force_delete(uow, tenant_id, "clerk", end_running=False)
    seconds.append(await ended(second, since, "adapter_deleted"))
    await run_on(kept)
    return f"version deleted: {seconds[0]:.2f} s, adapter: {seconds[1]:.2f} s; with end_running=False they ran on"


async def deletion(world: World) -> str:
    running = [await world.stream(gateway, 2) for gateway in (0, 1)]
    since = time.monotonic()
    async with unit_of_work(world.database, OPERATOR, None, None) as uow:
        await tenants.delete(uow, world.callers.tenant_id)
    return f"tenant deleted: {await ended(running, since, 'tenant_suspended'):.2f} s"


async def play(plan: FarmPlan, scenarios: Sequence[Scenario], outcomes: set[str]) -> list[str]:
    database = Database(plan.database_url, pool_size=4)
    try:
        async with database.as_operator() as session:
            operator = (await KeyRepository(session).create(None, "operator", ["operator"])).plaintext
        callers = await made(database, "acme")
        with farm(plan) as gateways:
            await ready(gateways)
            async with AsyncExitStack() as stack:
                limits = httpx.Limits(max_connections=None)
                client = await stack.enter_async_context(httpx.AsyncClient(timeout=PATIENCE_S, limits=limits))
                urls = [gateway.url for gateway in gateways]
                world = World(urls, client, database, operator, callers)
                lines = [await scenario(world) for scenario in scenarios]
                await check_ledger(world, plan, world.answers, outcomes)
        return lines
    finally:
        await database.close()


def plan_of(database_url: str, valkey_url: str, folder: Path) -> FarmPlan:
    return FarmPlan(
        database_url=database_url,
        valkey_url=valkey_url,
        journals=str(folder),
        gateways=2,
        price_prompt=1_000_000,
        price_cached=500_000,
        price_completion=2_000_000,
        lease_s=20.0,
        heartbeat_s=2.0,
        valkey_s=1.0,
        script=FakeScript(token_interval_s=INTERVAL_S),
    )


def test_what_ends_through_one_gateway_ends_on_both(
    database_url: str, valkey_url: str, tmp_path: Path
) -> None:
    plan = plan_of(database_url, valkey_url, tmp_path)
    scenarios = [suspension, revocation, forced_deletion, deletion]
    lines = asyncio.run(play(plan, scenarios, {"completed", "revoked"}))
    print("", *lines, sep="\n")


def test_after_postgresql_was_away(external: ServerPair, tmp_path: Path) -> None:
    facts = external.start(transient=False)
    upgrade(facts.database_url)

    async def outage(world: World) -> str:
        running = [await world.stream(gateway) for gateway in (0, 1)]
        os.kill(postmaster_of(set(external.pids)), signal.SIGINT)
        async with asyncio.timeout(PATIENCE_S):
            while external.ended != ["PostgreSQL"]:
                await asyncio.sleep(0.05)
        before = [each.answer.tokens for each in running]
        await asyncio.sleep(1.5)
        assert all(each.answer.tokens > 20 + tokens for each, tokens in zip(running, before, strict=True))
        await asyncio.to_thread(external.start, transient=False)
        since = time.monotonic()
        async with unit_of_work(world.database, OPERATOR, None, None) as uow:
            await tenants.suspend(uow, world.callers.tenant_id)
        return f"suspended once PostgreSQL was back: {await ended(running, since, 'tenant_suspended'):.2f} s after its return"

    plan = plan_of(facts.database_url, facts.redis_url, tmp_path / "journals")
    print("", *asyncio.run(play(plan, [outage], {"revoked"})), sep="\n")
