"""Requests that a tenant has recorded, over HTTP: off by default, with their bounds, and as a suite of what was answered."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest
from msgspec.structs import replace
from sqlalchemy import text
from tests.platform.web.managed_tenant import ManagedTenant, managed

from loraplex.engine.fake_engine import FakeScript, Fault
from loraplex.platform.evaluations.recording import (
    MAX_HELD_BYTES,
    MAX_TENANT_BYTES,
    RecordingQueue,
    RecordingWriter,
)
from loraplex.platform.evaluations.suite import Case, parse_suite
from loraplex.tenants.evaluations.encrypted_contents import EncryptedContents

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "How warm is it in Rome?"}]
GREEDY: dict[str, Any] = {"model": "demo/base", "messages": USER, "temperature": 0}
CALL = ('<tool_call>{"name": "get_weather", ', '"arguments": {"city": ', '"Rome"}}</tool_call>')
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
RULES = {"percent": 100, "retention_days": 7, "max_requests": 100}


def writer_of(tenant: ManagedTenant) -> RecordingWriter:
    parts = tenant.gateway.app.state.planes.dependencies
    contents = EncryptedContents(parts.derive_key)
    return RecordingWriter(database=parts.database, queue=parts.recordings, contents=contents)


async def set_policy(tenant: ManagedTenant, rules: object, etag: int = 1) -> Any:
    headers = {"if-match": f'"{etag}"'}
    return await tenant.http.put("data-policy", json={"record_requests": rules}, headers=headers)


async def ask(tenant: ManagedTenant, answer: tuple[str, ...], **fields: Any) -> None:
    tenant.gateway.engine.script = FakeScript(answers=(answer,))
    headers = {"authorization": f"Bearer {tenant.key}"}
    response = await tenant.gateway.post(CHAT, {**GREEDY, **fields}, **headers)
    assert response.status_code == 200, response.text


async def leave(tenant: ManagedTenant) -> None:
    """Read the first words of a stream, then leave."""
    engine = tenant.gateway.engine
    engine.script = FakeScript(answers=(("It ", "is ") * 500,), token_interval_s=0.01)
    client = tenant.gateway.client(tenant.key)
    async with await client.chat.completions.create(**GREEDY, stream=True) as stream:
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
    async with asyncio.timeout(10):
        while engine.running or not tenant.gateway.admissions.settled:
            await asyncio.sleep(0.01)


async def suite_of(tenant: ManagedTenant, **body: object) -> tuple[Any, list[Case]]:
    """Make a suite; return the response's document, and its cases."""
    made = await tenant.http.post("suites/from-requests", json={"name": "recorded", **body})
    assert made.status_code == 201, made.text
    async with tenant.database.as_tenant(tenant.id) as session:
        [row] = (await session.execute(text("SELECT id, content FROM suites"))).all()
    contents = EncryptedContents(tenant.gateway.app.state.planes.dependencies.derive_key)
    suite = parse_suite(contents.decrypt(tenant.id, row.id, row.content))
    assert suite.sha256 == made.json()["sha256"]
    return made.json(), list(suite.cases)


async def rows(tenant: ManagedTenant) -> list[Any]:
    async with tenant.database.as_operator() as session:
        query = text("SELECT * FROM recorded_requests ORDER BY id")
        return [*(await session.execute(query)).all()]


@pytest.fixture
async def recorded(tenant: ManagedTenant) -> AsyncIterator[ManagedTenant]:
    """A tenant that records every request."""
    assert (await set_policy(tenant, RULES)).status_code == 200
    await writer_of(tenant).step()
    yield tenant


async def test_a_suite_expects_what_was_answered(recorded: ManagedTenant) -> None:
    await ask(recorded, ("30 ", "degrees"), stream=True, user="mara", metadata={"plan": "gold"})
    await ask(recorded, CALL, tools=[WEATHER], stream=True)
    await ask(recorded, ("a", "b", "END", "c"), stop=["END"])
    await ask(recorded, ('{"warm": ', "true}"), response_format={"type": "json_object"})
    await ask(recorded, ("Warm",), temperature=0.7)
    await ask(recorded, ("Warm",), presence_penalty=1.0)
    await leave(recorded)
    await writer_of(recorded).step()
    secret = b"".join(row.content for row in await rows(recorded))
    assert b"Rome" not in secret and b"degrees" not in secret
    document, cases = await suite_of(recorded)
    assert document["cases"] == 7 and document["left_out"] == 0
    base = recorded.gateway.engine.script.info.model_digest
    assert document["base_digest"] == base
    cancelled, penalized, sampled, json_case, stopped, called, streamed = cases
    assert streamed.messages == USER and streamed.expect.given == {"exact", "finish_reason"}
    assert (streamed.expect.exact, streamed.expect.finish_reason) == ("30 degrees", "stop")
    assert called.expect.tool_calls is not None and called.expect.finish_reason == "tool_calls"
    assert [(each.name, each.arguments) for each in called.expect.tool_calls] == [
        ("get_weather", {"city": "Rome"})
    ]
    assert stopped.stop == ["END"] and stopped.expect.exact == "ab"
    assert json_case.expect.json_subset == {"warm": True}
    for case, temperature in ((sampled, 0.7), (penalized, 0.0)):
        assert case.expect.given == {"finish_reason"} and case.temperature == temperature
    assert cancelled.expect.given == {"regex"}


async def test_a_failed_request_expects_an_answer(recorded: ManagedTenant) -> None:
    engine, headers = recorded.gateway.engine, {"authorization": f"Bearer {recorded.key}"}
    engine.script = FakeScript(faults=(Fault(kind="nan", after_tokens=2),))
    engine._injected = [0]
    response = await recorded.gateway.post(CHAT, GREEDY, **headers)
    assert response.status_code == 500
    # Of these, no answer could become a case: the tenant's limits, and bad requests, say nothing of a model.
    assert (await recorded.gateway.post(CHAT, {**GREEDY, "top_p": 7}, **headers)).status_code == 400
    await writer_of(recorded).step()
    _, [case] = await suite_of(recorded)
    assert case.expect.given == {"regex"}


async def test_nothing_is_recorded_unless_the_tenant_says_so(tenant: ManagedTenant) -> None:
    policy = await tenant.http.get("data-policy")
    assert policy.json() == {"record_requests": None, "recorded": 0} and policy.headers["etag"] == '"1"'
    await writer_of(tenant).step()
    await ask(tenant, ("Warm",))
    await writer_of(tenant).step()
    assert await rows(tenant) == []
    refused = await tenant.http.post("suites/from-requests", json={"name": "recorded"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "limit"


async def test_another_tenant_sees_nothing(recorded: ManagedTenant) -> None:
    await ask(recorded, ("Warm",))
    async with managed(recorded.gateway, "rival") as rival:
        await ask(rival, ("Cold",))
        await writer_of(recorded).step()
        assert {row.tenant_id for row in await rows(recorded)} == {recorded.id}
        assert (await rival.http.get("data-policy")).json()["recorded"] == 0
        response = await rival.http.post("suites/from-requests", json={"name": "recorded"})
        assert response.status_code == 400
        async with rival.database.as_tenant(rival.id) as session:
            assert await session.scalar(text("SELECT count(*) FROM recorded_requests")) == 0
    assert (await recorded.http.get("data-policy")).json()["recorded"] == 1


async def test_a_policy_bounds_what_is_kept_and_its_end_deletes_it(recorded: ManagedTenant) -> None:
    writer = writer_of(recorded)
    for number in range(4):
        await ask(recorded, (f"Answer {number}",))
    await writer.step()
    ids = [row.id for row in await rows(recorded)]
    stale = await set_policy(recorded, None, etag=1)
    assert stale.status_code == 412
    changed = await set_policy(recorded, {**RULES, "max_requests": 2, "retention_days": 1}, etag=2)
    assert changed.json()["recorded"] == 2 and changed.headers["etag"] == '"3"'
    kept = await rows(recorded)
    assert [row.id for row in kept] == ids[2:]
    assert all((row.expires_at - row.created_at).days == 1 for row in kept)
    await ask(recorded, ("Answer 5",))
    await writer.step()
    assert [row.id for row in await rows(recorded)][:-1] == ids[3:]
    # What a gateway still holds when the recording ends is not kept either.
    await ask(recorded, ("Answer 6",))
    assert (await set_policy(recorded, None, etag=3)).json() == {"record_requests": None, "recorded": 0}
    await writer.step()
    assert await rows(recorded) == []
    actions = await recorded.actions()
    assert [each for each in actions if each[0] == "data_policy.change"] == [
        ("data_policy.change", "data-policy")
    ] * 3


@pytest.mark.parametrize(
    ("rules", "param"),
    [
        ({**RULES, "percent": 0}, "record_requests.percent"),
        ({**RULES, "retention_days": 91}, "record_requests.retention_days"),
        ({**RULES, "max_requests": 10_001}, "record_requests.max_requests"),
        ({**RULES, "who": "all"}, "record_requests.who"),
    ],
)
async def test_a_policy_without_bounds_is_refused(tenant: ManagedTenant, rules: object, param: str) -> None:
    response = await set_policy(tenant, rules)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


async def test_what_a_suite_cannot_have_is_left_out(recorded: ManagedTenant) -> None:
    await recorded.gateway.adapter("writer", "pirate", "a" * 64)
    await ask(recorded, ("Warm",), model="pirate")
    await ask(recorded, ("W" * 70_000,), model="pirate@1")
    await ask(recorded, ("W" * 300_000,), model="pirate")
    await ask(recorded, ("Cold",))
    engine = recorded.gateway.engine
    await writer_of(recorded).step()
    assert not recorded.gateway.app.state.planes.dependencies.recordings.held
    assert [row.adapter for row in await rows(recorded)] == ["pirate", "pirate", None]
    document, [case] = await suite_of(recorded, adapter="pirate")
    assert document["left_out"] == 1 and case.expect.exact == "Warm"
    response = await recorded.http.post("suites/from-requests", json={"name": "other", "adapter": "parrot"})
    assert response.status_code == 400
    info = replace(engine.script.info, model_digest="f" * 64)
    engine.script = FakeScript(info=info)
    response = await recorded.http.post("suites/from-requests", json={"name": "other"})
    assert response.status_code == 400


def test_a_queue_holds_a_bounded_number_of_bytes_and_each_tenant_its_share() -> None:
    queue, size, tenants = RecordingQueue(), 200 << 10, [uuid4() for _ in range(6)]
    for tenant_id in tenants[:5]:
        while queue.hold(tenant_id, size, size):
            continue
    assert [queue.held[each] // size for each in tenants[:4]] == [MAX_TENANT_BYTES // size] * 4
    assert (
        queue.held.total() <= MAX_HELD_BYTES < queue.held.total() + size and queue.missed["queue_full"] == 5
    )
    queue.release(tenants[0], size)
    assert queue.hold(tenants[5], size, size)
    assert not queue.hold(tenants[5], 1, 257 << 10) and queue.missed["too_large"] == 1
