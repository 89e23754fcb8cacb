"""The meter export: each identifier once in a file, however it was interrupted, and resent to a URL until acknowledged."""

import asyncio
import json
import stat
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from prometheus_client import CollectorRegistry
from standardwebhooks import Webhook
from tests.platform.jobs.receiver import LOCAL, OK, FakeResolver, fixed, receiving
from tests.platform.jobs.test_webhook_delivery import parts, until
from tests.tenants.registry_records import make_tenant
from tests.tenants.usage.meters import use

from loraplex.platform.jobs.meter_export import (
    MAX_LINE_BYTES,
    MeterExporter,
    MeterFile,
    MeterSink,
    MeterUrl,
    NotExported,
)
from loraplex.platform.jobs.receiver_client import ReceiverClient
from loraplex.platform.observability.webhook_metrics import WebhookMetrics
from loraplex.tenants.database import Database
from loraplex.tenants.usage.meter_events import BATCH, EVENT_NAME, MeterEvent, identifier
from loraplex.tenants.webhooks.signature import new_secret

TEN = datetime(2026, 11, 23, 10, tzinfo=UTC)
NOW = TEN + timedelta(hours=1, minutes=10)


def export(database: Database, sink: MeterSink) -> MeterExporter:
    return MeterExporter(
        database=database, sink=sink, metrics=WebhookMetrics(CollectorRegistry()), poll_s=0.01
    )


def events(first: int, count: int) -> list[MeterEvent]:
    tenant_id = uuid4()
    return [
        MeterEvent(
            event_name=EVENT_NAME.format(meter="cached_prompt"),
            identifier=identifier(tenant_id, TEN, "cached_prompt", 2_000_000_000 + number),
            timestamp=int(TEN.timestamp()),
            payload={"tenant_id": str(tenant_id), "value": str(-(2**62))},
        )
        for number in range(first, first + count)
    ]


def identifiers(path: Path) -> list[str]:
    return [json.loads(line)["identifier"] for line in path.read_text().splitlines()]


async def test_a_closed_hour_is_appended_once(database: Database, tmp_path: Path) -> None:
    path, tenant_id = tmp_path / "meter.jsonl", await make_tenant(database)
    await use(database, tenant_id, TEN, (70, 30, 5))
    for _ in range(2):
        job = export(database, MeterFile(path))
        await job.collect(NOW)
        assert not await job.send()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["payload"]["value"] for line in lines] == ["30", "5", "70"]
    assert lines[0] == {
        "event_name": "loraplex_cached_prompt_tokens",
        "identifier": identifier(tenant_id, TEN, "cached_prompt", 1),
        "timestamp": int(TEN.timestamp()),
        "payload": {"tenant_id": str(tenant_id), "value": "30"},
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_batch_that_was_written_but_not_recorded_is_not_written_again(
    database: Database, tmp_path: Path
) -> None:
    path, tenant_id = tmp_path / "meter.jsonl", await make_tenant(database)
    await use(database, tenant_id, TEN, (70, 30, 5))

    class Dies(MeterFile):
        async def send(self, events: Sequence[MeterEvent]) -> None:
            await super().send(events)
            raise OSError("the process dies here")

    job = export(database, Dies(path))
    await job.collect(NOW)
    with pytest.raises(OSError, match="dies here"):
        await job.send()
    assert len(identifiers(path)) == 3
    job = export(database, MeterFile(path))
    await job.send()
    assert len(identifiers(path)) == 3 and not await job.send()


@pytest.mark.parametrize("cut", [1, 40, 200])
async def test_a_write_that_broke_off_is_completed(tmp_path: Path, cut: int) -> None:
    path, batch = tmp_path / "meter.jsonl", events(0, 3)
    sink = MeterFile(path)
    await sink.send(batch[:1])
    await sink.send(batch)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    await sink.send(batch)
    assert path.read_bytes() == whole and len(identifiers(path)) == 3


async def test_the_last_batch_is_found_in_a_long_file(tmp_path: Path) -> None:
    path, sink = tmp_path / "meter.jsonl", MeterFile(tmp_path / "meter.jsonl")
    for first in range(0, 3 * BATCH, BATCH):
        await sink.send(events(first, BATCH))
    last = events(0, BATCH)
    assert max(map(len, path.read_bytes().splitlines())) < MAX_LINE_BYTES
    for _ in range(2):
        await sink.send(last)
    assert len(identifiers(path)) == len(set(identifiers(path))) == 4 * BATCH


async def test_a_url_gets_signed_events_until_it_acknowledges_them(database: Database) -> None:
    tenant_id, secret = await make_tenant(database), new_secret()
    await use(database, tenant_id, TEN, (70, 30, 5))
    answers = [b"HTTP/1.1 503 Busy\r\n\r\n", OK]

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(answers.pop(0))

    async with receiving(answer) as receiver:
        client = ReceiverClient(FakeResolver([[LOCAL]]), allow_private=True, total_s=60.0)
        job = export(database, MeterUrl(client, f"http://meter.example:{receiver.port}/in", secret))
        await job.collect(NOW)
        with pytest.raises(NotExported, match="503"):
            await job.send()
        await job.send()
        assert not await job.send()
    first, second = (parts(request) for request in receiver.requests)
    document = Webhook(secret).verify(second[1], dict(second[0]))
    assert [event["payload"]["value"] for event in document["events"]] == ["30", "5", "70"]
    assert first[1] == second[1]


async def test_a_url_of_a_private_address_gets_nothing(database: Database) -> None:
    await use(database, await make_tenant(database), TEN, (1, 0, 0))
    async with receiving(fixed(OK)) as receiver:
        client = ReceiverClient(FakeResolver([[LOCAL]]), allow_private=False)
        job = export(database, MeterUrl(client, f"https://meter.example:{receiver.port}/", new_secret()))
        await job.collect(NOW)
        with pytest.raises(NotExported, match="address_not_allowed"):
            await job.send()
    assert receiver.requests == []


async def test_the_job_goes_on_after_failures(database: Database) -> None:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=3)
    await use(database, await make_tenant(database), hour, (1, 0, 0))
    failures: list[Exception] = [OSError("disk full"), NotExported("503"), RuntimeError("a defect")]
    sent: list[MeterEvent] = []

    class Failing:
        async def send(self, events: Sequence[MeterEvent]) -> None:
            if failures:
                raise failures.pop(0)
            sent.extend(events)

    task = asyncio.create_task(export(database, Failing()).run())
    await until(lambda: bool(sent))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(sent) == 1
