"""Requests that run when their tenant, key or version ends: what was delivered is billed, and nothing of them is left."""

import asyncio
import json
from typing import Any
from uuid import UUID

import pytest

from loraplex.engine.errors import EngineLost
from loraplex.engine.fake_engine import FakeScript, Fault
from loraplex.grammar.spec import GrammarSpec
from loraplex.platform.inference import engine_streams, generation
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.ledger.usage_ledger import Ended

BODY: Any = {"model": "demo/base", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 500}
SLOW = FakeScript(token_interval_s=0.01)
SUSPENDED = (403, "tenant_suspended")
WAIT_S = 60.0


async def until(condition: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def tenant_of(gateway: Any) -> UUID:
    async with gateway.database.as_operator() as session:
        return (await TenantRepository(session).get("acme")).id


async def end(gateway: Any) -> None:
    """As the gateway does once it reads that the tenant was suspended."""
    gateway.admissions.on_ended(Ended(await tenant_of(gateway), policy_epoch=1_000))


def nothing_is_left(gateway: Any) -> bool:
    admissions = gateway.admissions
    ended = len(admissions.settled) + len(admissions.cancelled)
    return gateway.engine.running == 0 and ended == len(admissions.asked)


def error_of(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def answering(gateway: Any, **fields: Any) -> "asyncio.Task[Any]":
    return asyncio.create_task(gateway.post("/v1/chat/completions", {**BODY, **fields}))


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_ends_with_an_error_and_is_billed_by_what_was_delivered(
    start_gateway: Any, n: int
) -> None:
    gateway = await start_gateway(SLOW)
    task = await answering(gateway, stream=True, n=n)
    await until(
        lambda: gateway.admissions.followed and gateway.admissions.followed[0]().completion_tokens > 9
    )
    await end(gateway)
    *events, error, rest = (await task).text.split("\n\n")
    assert rest == "" and "[DONE]" not in error
    name, data = error.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"] == {
        "message": "The tenant was suspended or deleted while this request ran.",
        "type": "permission_error",
        "param": None,
        "code": "tenant_suspended",
    }
    delivered = sum(bool(json.loads(each[6:])["choices"][0]["delta"].get("content")) for each in events)
    await until(lambda: nothing_is_left(gateway))
    [(_, usage)] = gateway.admissions.settled
    assert (usage.outcome, usage.refused, usage.completion_tokens) == ("revoked", False, delivered)
    assert delivered > 9
    assert [each.finish_reason for each in gateway.recorder.timings] == ["abort"]
    assert gateway.admissions.refused == []


async def test_a_whole_response_is_refused_as_the_next_request_would_be(start_gateway: Any) -> None:
    gateway = await start_gateway(SLOW)
    task = await answering(gateway)
    await until(
        lambda: gateway.admissions.followed and gateway.admissions.followed[0]().completion_tokens > 5
    )
    await end(gateway)
    assert error_of(await task) == SUSPENDED
    await until(lambda: nothing_is_left(gateway))
    [(_, usage)] = gateway.admissions.settled
    assert (usage.outcome, usage.completion_tokens) == ("revoked", 0), "nothing of it was delivered"
    assert usage.prompt_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_while_it_waits_for_the_engine(start_gateway: Any, stream: bool) -> None:
    gateway = await start_gateway(FakeScript(start_delay_s=3600.0))
    task = await answering(gateway, stream=stream)
    await until(lambda: gateway.engine.running and gateway.admissions.followed)
    await end(gateway)
    assert error_of(await task) == SUSPENDED
    await until(lambda: nothing_is_left(gateway))
    [(_, usage)] = gateway.admissions.settled
    assert (usage.outcome, usage.tokens) == ("revoked", 0)


async def test_while_its_schema_is_checked(start_gateway: Any) -> None:
    gateway = await start_gateway()
    reached = asyncio.Event()

    async def check(namespace: bytes, spec: GrammarSpec, *, param: str | None = None) -> None:
        reached.set()
        await asyncio.Event().wait()

    gateway.compile_checks.check = check
    task = await answering(gateway, structured_outputs={"json": {"type": "object"}})
    await asyncio.wait_for(reached.wait(), WAIT_S)
    await end(gateway)
    assert error_of(await task) == SUSPENDED
    await until(lambda: nothing_is_left(gateway))
    assert gateway.admissions.settled == [] and gateway.engine.requests == []
    assert [each.code for each in gateway.admissions.refused] == ["tenant_suspended"]


async def test_while_its_admission_waits(start_gateway: Any) -> None:
    gateway = await start_gateway()
    reached, released = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        reached.set()
        await released.wait()

    gateway.admissions.before_confirmation = wait
    task = await answering(gateway)
    await asyncio.wait_for(reached.wait(), WAIT_S)
    await end(gateway)
    released.set()
    assert error_of(await task) == SUSPENDED
    await until(lambda: nothing_is_left(gateway))


@pytest.mark.parametrize("tokens", [0, 3])
async def test_while_it_waits_for_another_engine(
    start_gateway: Any, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    monkeypatch.setattr(generation, "STOP_S", 0.05)
    fault = Fault(kind="fail", code=EngineLost.code, message="it ended", after_tokens=tokens, times=1)
    gateway, waiting = await start_gateway(FakeScript(faults=(fault,))), asyncio.Event()

    async def never() -> None:
        waiting.set()
        await asyncio.Event().wait()

    gateway.engine.wait_ready = never
    task = await answering(gateway)
    await asyncio.wait_for(waiting.wait(), WAIT_S)
    await end(gateway)
    assert error_of(await task) == SUSPENDED
    await until(lambda: nothing_is_left(gateway))
    assert [usage.outcome for _, usage in gateway.admissions.settled] == ["revoked"]
    assert len(gateway.engine.requests) == 1


async def test_an_engine_that_aborts_nothing_holds_no_stream(
    start_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "STOP_S", 0.05)
    monkeypatch.setattr(engine_streams, "ABORT_S", 0.1)
    gateway = await start_gateway(FakeScript(faults=(Fault(kind="hang", after_tokens=3),)))

    async def abort(request_id: str) -> None:
        await asyncio.Event().wait()

    gateway.engine.abort = abort
    task = await answering(gateway, stream=True)
    await until(
        lambda: gateway.admissions.followed and gateway.admissions.followed[0]().completion_tokens == 3
    )
    await end(gateway)
    assert '"code":"tenant_suspended"' in (await task).text
    [(_, usage)] = gateway.admissions.settled
    assert (usage.outcome, usage.completion_tokens) == ("revoked", 3)


async def test_what_has_ended_and_what_comes_later_is_served(start_gateway: Any) -> None:
    gateway = await start_gateway()
    assert (await gateway.post("/v1/chat/completions", {**BODY, "max_tokens": 3})).status_code == 200
    tenant_id = await tenant_of(gateway)
    epoch = gateway.admissions.asked[0].policy_epoch
    gateway.admissions.on_ended(Ended(tenant_id, policy_epoch=epoch - 1))
    task = await answering(gateway, max_tokens=20, stream=True)
    gateway.admissions.on_ended(Ended(tenant_id, policy_epoch=epoch - 1))
    assert "[DONE]" in (await task).text
    assert [usage.outcome for _, usage in gateway.admissions.settled] == ["completed", "completed"]


async def test_a_client_that_reads_nothing_holds_nothing(
    start_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "STOP_S", 0.05)
    # Each token fills some of the buffers of the connection.
    gateway = await start_gateway(FakeScript(answers=(("x" * 100_000,) * 450,), token_interval_s=0.001))
    _, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    body = json.dumps({**BODY, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.key}\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    await until(lambda: gateway.admissions.followed)
    used, before = gateway.admissions.followed[0], -1
    async with asyncio.timeout(WAIT_S):
        while (now := used().completion_tokens) != before or not now:
            before = now
            await asyncio.sleep(0.3)
    assert before < 450, "it waits for its reader"
    await end(gateway)
    async with asyncio.timeout(20):
        while not nothing_is_left(gateway):
            await asyncio.sleep(0.01)
    [(_, usage)] = gateway.admissions.settled
    assert usage.outcome == "revoked" and usage.completion_tokens >= before
    writer.close()
