"""The delivery job against a real receiver that verifies with the official library of Standard Webhooks."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

import msgspec
from prometheus_client import CollectorRegistry
from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession
from standardwebhooks import Webhook
from tests.platform.jobs.receiver import LOCAL, OK, FakeResolver, fixed, receiving
from tests.tenants.registry_records import make_tenant
from tests.tenants.webhooks.webhooks import add_event, add_webhook, dispatched

from loraplex.platform.jobs.receiver_client import ReceiverClient, SendResult
from loraplex.platform.jobs.webhook_delivery import (
    DELAYS_S,
    JITTER,
    PER_TENANT,
    WebhookDispatcher,
    delay_after,
    message,
)
from loraplex.platform.observability.webhook_metrics import WebhookMetrics
from loraplex.platform.server.secret import derive
from loraplex.tenants.actors import system_actor
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable
from loraplex.tenants.models import OutboxEvent, WebhookDelivery, WebhookEndpoint
from loraplex.tenants.unit_of_work import unit_of_work
from loraplex.tenants.webhooks import use_cases as webhooks
from loraplex.tenants.webhooks.deliveries import Deliveries
from loraplex.tenants.webhooks.encrypted_secrets import WebhookSecrets
from loraplex.tenants.webhooks.events import InvoiceFinalized
from loraplex.tenants.webhooks.records import EVENT_TYPES, MAX_ATTEMPTS, NewWebhookDocument
from loraplex.tenants.webhooks.use_cases import WebhookRules

SECRETS = WebhookSecrets(partial(derive, b"the secret of a test's server"))
RULES = WebhookRules(SECRETS, allow_private=True)


class Gateway:
    """A running delivery job and its metrics."""

    def __init__(self, database: Database, client: Any = None, secrets: WebhookSecrets = SECRETS) -> None:
        self.registry = CollectorRegistry()
        self.job = WebhookDispatcher(
            database=database,
            client=client or ReceiverClient(FakeResolver([[LOCAL]]), allow_private=True, total_s=60.0),
            secrets=secrets,
            metrics=WebhookMetrics(self.registry),
            poll_s=0.01,
            retry_s=0.01,
        )

    def count(self, result: str) -> float:
        return self.registry.get_sample_value("loraplex_webhook_deliveries_total", {"result": result}) or 0.0

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Gateway"]:
        task = asyncio.create_task(self.job.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool] | Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while True:
            reached = condition()
            if reached if isinstance(reached, bool) else await reached:
                return
            await asyncio.sleep(0.01)


async def create(database: Database, tenant_id: UUID, url: str) -> NewWebhookDocument:
    async with unit_of_work(database, system_actor("test"), tenant_id, None) as uow:
        return await webhooks.create(uow, tenant_id, RULES, url, EVENT_TYPES)


async def rows(database: Database) -> list[WebhookDelivery]:
    async with database.as_operator() as session:
        return [*await session.scalars(select(WebhookDelivery).order_by(WebhookDelivery.created_at))]


async def make_due(database: Database) -> None:
    async with database.as_operator() as session:
        await session.execute(text("UPDATE webhook_deliveries SET due_at = now() WHERE state = 'pending'"))


def parts(request: bytes) -> tuple[Mapping[str, str], bytes]:
    head, _, body = request.partition(b"\r\n\r\n")
    lines = (line.partition(": ") for line in head.decode().split("\r\n")[1:])
    return {name: value for name, _, value in lines}, body


def verified(request: bytes, secret: str) -> Any:
    headers, body = parts(request)
    return Webhook(secret).verify(body, dict(headers))


async def test_an_event_arrives_signed_typed_and_versioned(database: Database) -> None:
    tenant_id = await make_tenant(database)
    async with receiving(fixed(OK)) as receiver:
        issued = await create(database, tenant_id, f"http://hooks.example:{receiver.port}/in")
        invoice_id = await add_event(database, tenant_id)
        async with Gateway(database).running() as gateway:
            await until(lambda: gateway.count("delivered") == 1)
            assert gateway.registry.get_sample_value("loraplex_outbox_oldest_seconds") is not None
    (request,) = receiver.requests
    document = verified(request, issued.secret)
    async with database.as_operator() as session:
        event = (await session.scalars(select(OutboxEvent))).one()
    assert document.keys() == {"id", "type", "version", "timestamp", "tenant_id", "data"}
    assert (document["id"], document["type"], document["version"]) == (str(event.id), "invoice.finalized", 1)
    assert document["tenant_id"] == str(tenant_id) and document["timestamp"].endswith("Z")
    assert msgspec.convert(document["data"], InvoiceFinalized).invoice_id == invoice_id
    headers, _ = parts(request)
    assert headers["webhook-id"] == str(event.id) and headers["content-type"] == "application/json"
    (delivery,) = await rows(database)
    assert (delivery.state, delivery.attempts, delivery.last_status) == ("delivered", 1, 204)


async def test_a_failed_delivery_is_repeated_with_the_same_id_and_body(database: Database) -> None:
    tenant_id = await make_tenant(database)
    answers = [b"HTTP/1.1 500 No\r\n\r\n", OK]

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(answers.pop(0))

    async with receiving(answer) as receiver:
        issued = await create(database, tenant_id, f"http://hooks.example:{receiver.port}/")
        await add_event(database, tenant_id)
        async with Gateway(database).running() as gateway:
            await until(lambda: gateway.count("failed") == 1)
            (failed,) = await rows(database)
            assert (failed.state, failed.last_status, failed.last_error) == ("pending", 500, "refused")
            assert failed.last_attempt_at is not None and failed.due_at > failed.last_attempt_at
            await make_due(database)
            await until(lambda: gateway.count("delivered") == 1)
    first, second = receiver.requests
    assert verified(first, issued.secret) == verified(second, issued.secret)
    assert (
        parts(first)[0]["webhook-id"] == parts(second)[0]["webhook-id"]
        and parts(first)[1] == parts(second)[1]
    )


async def test_a_rotated_secret_signs_beside_the_new_one_until_its_grace_ends(database: Database) -> None:
    tenant_id = await make_tenant(database)
    async with receiving(fixed(OK)) as receiver, Gateway(database).running() as gateway:
        old = await create(database, tenant_id, f"http://hooks.example:{receiver.port}/")

        async def rotated(grace_s: int) -> NewWebhookDocument:
            async with unit_of_work(database, system_actor("test"), tenant_id, None) as uow:
                new = await webhooks.rotate(uow, tenant_id, old.id, RULES, grace_s)
            await add_event(database, tenant_id)
            count = len(receiver.requests)
            await until(lambda: len(receiver.requests) > count)
            return new

        new = await rotated(3600)
        assert verified(receiver.requests[0], old.secret) == verified(receiver.requests[0], new.secret)
        newest = await rotated(0)
        assert verified(receiver.requests[1], newest.secret) is not None
        assert " " not in parts(receiver.requests[1])[0]["webhook-signature"]
        await until(lambda: gateway.count("delivered") == 2)


async def test_a_tenant_with_silent_receivers_delays_no_other(database: Database) -> None:
    busy, other = await make_tenant(database, "busy"), await make_tenant(database, "other")
    open_now, most = 0, 0
    released = asyncio.Event()

    async def silent(writer: asyncio.StreamWriter) -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await released.wait()
        open_now -= 1
        writer.write(OK)

    async with receiving(silent) as silence, receiving(fixed(OK)) as receiver:
        await create(database, busy, f"http://silent.example:{silence.port}/")
        await create(database, other, f"http://hooks.example:{receiver.port}/")
        for _ in range(2 * PER_TENANT):
            await add_event(database, busy)
        async with Gateway(database).running() as gateway:
            await until(lambda: open_now == PER_TENANT)
            for _ in range(2 * PER_TENANT):
                await add_event(database, other)
            await until(lambda: gateway.count("delivered") == 2 * PER_TENANT)
            assert len(receiver.requests) == 2 * PER_TENANT and open_now == PER_TENANT
            released.set()
            await until(lambda: gateway.count("delivered") == 4 * PER_TENANT)
    assert most == PER_TENANT


async def test_what_a_stopped_gateway_had_claimed_is_repeated_by_another(database: Database) -> None:
    tenant_id = await make_tenant(database)
    asked = asyncio.Event()

    class Hanging:
        async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> SendResult:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

    async with receiving(fixed(OK)) as receiver:
        await create(database, tenant_id, f"http://hooks.example:{receiver.port}/")
        await add_event(database, tenant_id)
        async with Gateway(database, Hanging()).running(), asyncio.timeout(60):
            await asked.wait()
        async with Gateway(database).running() as second:
            await make_due(database)
            await until(lambda: second.count("delivered") == 1)
    (delivery,) = await rows(database)
    assert (delivery.state, delivery.attempts) == ("delivered", 2) and len(receiver.requests) == 1


async def test_a_defect_met_by_one_delivery_ends_neither_the_job_nor_the_delivery(database: Database) -> None:
    tenant_id = await make_tenant(database)
    received: list[UUID] = []

    class Defective:
        async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> SendResult:
            received.append(UUID(headers["webhook-id"]))
            if len(received) == 1:
                raise RuntimeError("a defect")
            return SendResult(200, None)

    await create(database, tenant_id, "http://hooks.example/")
    async with Gateway(database, Defective()).running() as gateway:
        await add_event(database, tenant_id)
        await until(lambda: len(received) == 1)
        await make_due(database)
        await until(lambda: gateway.count("delivered") == 1)
    assert received[0] == received[1]


async def test_errors_of_the_database_and_defects_of_the_job_are_survived(database: Database) -> None:
    failures: list[Exception] = [DatabaseUnavailable("away"), RuntimeError("a defect")]

    class Failing(Database):
        def as_operator(self) -> AbstractAsyncContextManager[AsyncSession]:
            if failures:
                raise failures.pop()
            return super().as_operator()

    tenant_id = await make_tenant(database)
    failing = Failing(database.url)
    async with receiving(fixed(OK)) as receiver:
        await create(database, tenant_id, f"http://hooks.example:{receiver.port}/")
        await add_event(database, tenant_id)
        async with Gateway(failing).running() as gateway:
            await until(lambda: gateway.count("delivered") == 1)
    await failing.close()


async def test_nothing_is_sent_with_a_secret_that_cannot_be_read(database: Database) -> None:
    tenant_id = await make_tenant(database)
    async with receiving(fixed(OK)) as receiver:
        await create(database, tenant_id, f"http://hooks.example:{receiver.port}/")
        await add_event(database, tenant_id)
        other_server = WebhookSecrets(partial(derive, b"the secret of another server"))
        async with Gateway(database, secrets=other_server).running() as gateway:
            await until(lambda: gateway.count("failed") == 1)
    (delivery,) = await rows(database)
    assert delivery.last_error == "secret_unreadable" and receiver.requests == []


async def test_a_secret_moved_to_another_endpoint_is_unreadable(database: Database) -> None:
    tenant_id = await make_tenant(database)
    issued = await create(database, tenant_id, "http://hooks.example/")
    async with database.as_operator() as session:
        encrypted = (await session.scalars(select(WebhookEndpoint.encrypted_secret))).one()
    assert issued.secret.encode() not in encrypted
    assert SECRETS.decrypt(tenant_id, issued.id, encrypted) == issued.secret
    async with receiving(fixed(OK)) as receiver:
        moved = await add_webhook(
            database, tenant_id, f"http://hooks.example:{receiver.port}/", encrypted_secret=encrypted
        )
        await add_event(database, tenant_id)
        await dispatched(database, moved)
        async with Gateway(database).running() as gateway:
            await until(lambda: gateway.count("failed") == 2)
    assert receiver.requests == []


async def test_waits_grow_as_recommended_within_their_jitter(database: Database) -> None:
    tenant_id = await make_tenant(database)
    await add_webhook(database, tenant_id)
    await add_event(database, tenant_id)
    assert len(DELAYS_S) == MAX_ATTEMPTS - 1
    async with database.as_operator() as session:
        await Deliveries(session).dispatch()
        (attempt,) = await Deliveries(session).claim(1, 1, {})
    assert attempt.attempts_left == MAX_ATTEMPTS - 1
    assert message(attempt) == message(attempt)
    for number, base in enumerate(DELAYS_S):
        after = {delay_after(replace(attempt, attempts_left=len(DELAYS_S) - number)) for _ in range(20)}
        low, high = timedelta(seconds=base * (1 - JITTER)), timedelta(seconds=base * (1 + JITTER))
        assert len(after) > 1 and all(low <= each <= high for each in after)
