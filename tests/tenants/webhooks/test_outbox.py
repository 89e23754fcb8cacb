"""An event is in the outbox exactly if the transaction that it reports was committed, and once."""

from hashlib import sha256
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import ProgrammingError
from tests.tenants.registry_records import RegistryWriter, add, make_tenant, set_state

from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.database import Database
from loraplex.tenants.models import Adapter, OutboxEvent
from loraplex.tenants.webhooks.events import (
    DATA_TYPES,
    AdapterState,
    InvoiceFinalized,
    QuotaThreshold,
    add_event,
)

CROSSED = """
    INSERT INTO quota_events (id, tenant_id, level, subject_id, limit_name, period, threshold, used, limit_value)
    VALUES (gen_random_uuid(), :tenant, :level, :subject, 'tokens_per_day', 'd:2026-11-21', 80, 4, 5)
    ON CONFLICT DO NOTHING
"""


async def events(database: Database) -> list[OutboxEvent]:
    async with database.as_operator() as session:
        return [*await session.scalars(select(OutboxEvent).order_by(OutboxEvent.created_at))]


def invoice(invoice_id: UUID, number: str = "2026-0001") -> InvoiceFinalized:
    return InvoiceFinalized(
        invoice_id=invoice_id, number=number, month="2026-10", currency="USD", total_micro=1_250_000
    )


def decoded(event: OutboxEvent) -> Any:
    return msgspec.convert(event.data, DATA_TYPES[event.type])


async def test_an_event_is_added_once_and_its_id_follows_from_what_it_reports(database: Database) -> None:
    tenant_id, other = await make_tenant(database, "acme"), await make_tenant(database, "rival")
    finalized = invoice(uuid4())
    for _ in range(2):
        async with database.as_operator() as session:
            await add_event(session, tenant_id, finalized)
    async with database.as_operator() as session:
        await add_event(session, tenant_id, finalized)
        await add_event(session, tenant_id, invoice(uuid4(), "2026-0002"))
        await add_event(session, other, finalized)
    found = await events(database)
    assert len(found) == 3 and len({event.id for event in found}) == 3
    first = next(event for event in found if event.tenant_id == tenant_id and decoded(event) == finalized)
    # The id is that of RFC 9562, version 8, of the same bytes.
    assert (
        first.id == event_id(f"{tenant_id}/invoice.finalized/{finalized.invoice_id}")
        and first.id.version == 8
    )


def event_id(text: str) -> UUID:
    hashed = int.from_bytes(sha256(text.encode()).digest()[:16], "big")
    hashed = hashed & ~(0xF << 76) | 8 << 76
    return UUID(int=hashed & ~(0b11 << 62) | 0b10 << 62)


async def test_an_event_of_a_rolled_back_transaction_is_none(database: Database) -> None:
    tenant_id = await make_tenant(database)

    class Interrupted(Exception):
        pass

    async def interrupted() -> None:
        async with database.as_operator() as session:
            await add_event(session, tenant_id, invoice(uuid4()))
            raise Interrupted

    with pytest.raises(Interrupted):
        await interrupted()
    assert await events(database) == []


async def test_a_crossed_budget_is_an_event_with_the_public_name_of_its_subject(database: Database) -> None:
    tenant_id = await make_tenant(database)
    async with database.as_tenant(tenant_id) as session:
        key = (await KeyRepository(session).create(tenant_id, "first", ["inference"])).record
        await add(RegistryWriter(session, tenant_id), 1)
        adapter_id = await session.scalar(select(Adapter.id))
    async with database.as_writer() as session:
        for level, subject in (
            ("tenant", tenant_id),
            ("key", key.id),
            ("adapter", adapter_id),
            ("key", key.id),
        ):
            await session.execute(text(CROSSED), {"tenant": tenant_id, "level": level, "subject": subject})
    found = [decoded(event) for event in await events(database)]
    crossed = QuotaThreshold(
        level="tenant",
        name=None,
        limit_name="tokens_per_day",
        period="d:2026-11-21",
        threshold=80,
        used=4,
        limit=5,
    )
    named = [("tenant", None), ("key", key.key_id), ("adapter", "support")]
    assert found == [msgspec.structs.replace(crossed, level=level, name=name) for level, name in named]


async def test_each_change_of_a_versions_state_is_an_event(database: Database) -> None:
    tenant_id = await make_tenant(database)

    async def move(*states: str) -> None:
        for state in states:
            async with database.as_tenant(tenant_id) as session:
                await set_state(session, state)

    async with database.as_tenant(tenant_id) as session:
        digest = (await add(RegistryWriter(session, tenant_id), 1, state="validating")).digest
    await move("ready", "ready", "quarantined", "ready", "deprecated", "quarantined", "deleting")
    found = [(event.type, decoded(event)) for event in await events(database)]
    steps = [
        *(("validating", "ready"), ("ready", "quarantined"), ("quarantined", "ready")),
        ("deprecated", "quarantined"),
    ]
    assert found == [
        (
            f"adapter.{state}",
            AdapterState(adapter="support", version=1, digest=digest, state=state, previous_state=before),
        )
        for before, state in steps
    ]
    assert len({event.id for event in await events(database)}) == len(steps)


async def test_who_settles_requests_writes_events_by_triggers_only(database: Database) -> None:
    tenant_id = await make_tenant(database)
    with pytest.raises(ProgrammingError, match="permission denied"):
        async with database.as_writer() as session:
            await add_event(session, tenant_id, invoice(uuid4()))


async def test_a_tenant_reads_its_own_events_and_writes_none(database: Database) -> None:
    mine, other = await make_tenant(database, "acme"), await make_tenant(database, "rival")
    async with database.as_operator() as session:
        for tenant_id in (mine, other):
            await add_event(session, tenant_id, invoice(uuid4()))
    async with database.as_tenant(mine) as session:
        assert [each.tenant_id for each in await session.scalars(select(OutboxEvent))] == [mine]
    with pytest.raises(ProgrammingError, match="permission denied"):
        async with database.as_tenant(mine) as session:
            await add_event(session, mine, invoice(uuid4()))
