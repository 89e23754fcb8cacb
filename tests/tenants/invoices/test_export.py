"""An exported bill is recomputed offline, and every single digit that is changed in the export is found."""

import random
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import psycopg
import pytest
from tests.platform.web.invoices.test_invoices import FEBRUARY, JANUARY, MILLION, finalize, grant, void
from tests.tenants.invoices.billed_tenant import BilledTenant, make_billed_tenant
from tests.tenants.registry_records import RegistryWriter, add

from loraplex.tenants.actors import system_actor
from loraplex.tenants.database import Database
from loraplex.tenants.errors import InvoiceStateForbids, UsageIncomplete
from loraplex.tenants.invoices import use_cases as invoices
from loraplex.tenants.invoices.export import BILLED, CREDITS, DIGESTS, INVOICE, PRICES, USAGE, digest_lines
from loraplex.tenants.invoices.rows import export_invoice
from loraplex.tenants.invoices.verification import verify_export
from loraplex.tenants.unit_of_work import unit_of_work

CHANGES = 200


async def export(database: Database, invoice_id: UUID, folder: Path) -> Path:
    async with database.as_operator() as session:
        await export_invoice(session, invoice_id, folder)
    return folder


async def busy_tenant(database: Database) -> BilledTenant:
    """A tenant with two months, an adapter, a correction, usage from before rate cards, credits, tax and a minimum."""
    tenant = await make_billed_tenant(database)
    await tenant.set_terms(
        issuer="Serving Ltd 7", vat_id="DE123456789", tax_rate_ppm=190_000, minimum_micro=30_000_000
    )
    await grant(tenant, 3_000_000)
    async with database.as_tenant(tenant.id) as session:
        adapter_id = (await add(RegistryWriter(session, tenant.id), 1)).adapter_id
    for day in range(20):
        at = JANUARY.begin + timedelta(days=day, microseconds=day)
        await tenant.use(
            at, 1000 + day, 500 * day, 77, reasoning=7, adapter_id=adapter_id if day % 3 else None
        )
    await tenant.use(JANUARY.begin, 9, amount_pico=5_500_000, with_version=False)
    return tenant


async def second_invoice(tenant: BilledTenant) -> UUID:
    """The invoice of February, after that of January: with late usage, and a correction of January."""
    await tenant.use(JANUARY.begin, 12_345, 678, 9)
    await tenant.use(JANUARY.begin, -1000, kind="correction")
    await tenant.use(FEBRUARY.begin, 7 * MILLION + 1, 3, 11)
    await tenant.use(FEBRUARY.begin, kind="correction", amount_pico=-123_456_789)
    return (await finalize(tenant, FEBRUARY)).id


async def test_the_recomputed_bill_agrees(database: Database, tmp_path: Path) -> None:
    tenant = await busy_tenant(database)
    first = (await finalize(tenant)).id
    second = await second_invoice(tenant)
    await tenant.use(JANUARY.begin, 99)
    for number, identity in enumerate((first, second)):
        assert verify_export(await export(database, identity, tmp_path / str(number))) == []
    assert len((tmp_path / "0" / USAGE).read_text().splitlines()) == 1 + 21
    assert len((tmp_path / "1" / USAGE).read_text().splitlines()) == 1 + 23 + 2


async def test_an_export_of_the_format_without_reasoning_is_recomputed(
    database: Database, tmp_path: Path
) -> None:
    tenant = await make_billed_tenant(database)
    await tenant.use(JANUARY.begin, 12_345, 678, 9)
    folder = await export(database, (await finalize(tenant)).id, tmp_path / "bill")
    for name, old, new in (
        (INVOICE, '"format": 2', '"format": 1'),
        (PRICES, ' "reasoning": null,\n', ""),
        (USAGE, ",reasoning_tokens", ""),
        (USAGE, ",9,0,", ",9,"),
    ):
        text = (folder / name).read_text()
        assert text.count(old) == 1
        (folder / name).write_text(text.replace(old, new))
    digests = [
        f"{line}\n"
        for name in (INVOICE, PRICES, BILLED, CREDITS, USAGE)
        for line in digest_lines(folder, name)
    ]
    (folder / DIGESTS).write_text("".join(digests))
    assert verify_export(folder) == []


async def test_a_minimum_that_another_invoice_helps_to_reach_is_recomputed(
    database: Database, tmp_path: Path
) -> None:
    tenant = await make_billed_tenant(database)
    await tenant.set_terms(minimum_micro=10_000_000)
    await tenant.use(JANUARY.begin, 4 * MILLION)
    await void(database, (await finalize(tenant)).id)
    await finalize(tenant, FEBRUARY)
    assert verify_export(await export(database, (await finalize(tenant)).id, tmp_path / "bill")) == []


@pytest.mark.parametrize("identity", [UUID(int=1), UUID(int=2**128 - 1)])
async def test_rows_whose_ids_contain_no_time_are_exported(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, identity: UUID
) -> None:
    tenant = await make_billed_tenant(database)
    monkeypatch.setattr("tests.tenants.invoices.billed_tenant.uuid7", lambda: identity)
    await tenant.use(JANUARY.begin, 5, amount_pico=5, with_version=False)
    monkeypatch.undo()
    await tenant.use(JANUARY.begin, MILLION)
    assert verify_export(await export(database, (await finalize(tenant)).id, tmp_path / "bill")) == []


async def test_every_single_digit_that_is_changed_is_found(database: Database, tmp_path: Path) -> None:
    tenant = await busy_tenant(database)
    await finalize(tenant)
    folder = await export(database, await second_invoice(tenant), tmp_path / "bill")
    assert verify_export(folder) == []
    digits = [
        (path.name, index)
        for path in sorted(folder.iterdir())
        for index, character in enumerate(path.read_text())
        if character.isdecimal() and path.name != DIGESTS
    ]
    chance = random.Random(15)
    named_by_arithmetic = 0
    for name, index in chance.sample(digits, CHANGES):
        text = (folder / name).read_text()
        other = chance.choice([each for each in "0123456789" if each != text[index]])
        (folder / name).write_text(text[:index] + other + text[index + 1 :])
        found = verify_export(folder)
        line = text.count("\n", 0, index) + 1
        assert found[-1].place == f"{name}:{line} (digest)", (name, line, found)
        named_by_arithmetic += len(found) > 1
        (folder / name).write_text(text)
    assert named_by_arithmetic > CHANGES // 4


async def test_damage_of_any_kind_is_found(database: Database, tmp_path: Path) -> None:
    tenant = await busy_tenant(database)
    folder = await export(database, (await finalize(tenant)).id, tmp_path / "bill")
    chance = random.Random(16)
    for _ in range(CHANGES):
        path = chance.choice(sorted(folder.iterdir()))
        content = path.read_bytes()
        at = chance.randrange(len(content))
        damaged = (
            content[:at] + chance.choice([b"", b"\0", b"\xff", b'"', b"[", b",", b"\n"]) + content[at + 1 :]
        )
        if damaged != content:
            path.write_bytes(damaged)
            assert verify_export(folder) != [], (path.name, at)
            path.write_bytes(content)
    assert verify_export(folder) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "place"),
    [
        (INVOICE, '"tokens": 7000001', '"tokens": 7000002', "invoice.json lines[6] tokens"),
        (INVOICE, '"tax": ', '"tax": 1', "invoice.json tax"),
        (USAGE, ",7000001,3,11,0,", ",7000001,4,11,0,", "usage.csv:25 amount_pico"),
        (USAGE, ",-1000,0,0,0,", ",-1001,0,0,0,", "invoice.json lines"),
        (USAGE, ",7000001,3,11,", ",x,3,11,", "usage.csv:25"),
    ],
)
async def test_the_first_difference_is_named(
    database: Database, tmp_path: Path, name: str, old: str, new: str, place: str
) -> None:
    tenant = await busy_tenant(database)
    await finalize(tenant)
    folder = await export(database, await second_invoice(tenant), tmp_path / "bill")
    text = (folder / name).read_text()
    assert text.count(old) == 1
    (folder / name).write_text(text.replace(old, new))
    first = verify_export(folder)[0]
    assert first.place.startswith(place), first


async def test_a_price_outside_of_its_time_is_named(database: Database, tmp_path: Path) -> None:
    tenant = await make_billed_tenant(database)
    await tenant.use(JANUARY.begin - timedelta(seconds=1), 5)
    await tenant.use(JANUARY.begin, 5)
    folder = await export(database, (await finalize(tenant)).id, tmp_path / "bill")
    (first,) = verify_export(folder)
    assert first.place == "usage.csv:2 admitted_at"


async def test_rows_written_while_the_invoice_became_final_are_left_to_the_next(
    database: Database, tmp_path: Path
) -> None:
    tenant = await make_billed_tenant(database)
    await tenant.use(JANUARY.begin, 1000)
    invoice = await finalize(tenant)
    racing = await tenant.use(JANUARY.begin, 77)
    with psycopg.connect(database.url) as owner:
        owner.execute("SET session_replication_role = replica")
        owner.execute(
            "UPDATE usage_records SET settled_at = %s WHERE id = %s", (invoice.finalized_at, racing)
        )
    folder = await export(database, invoice.id, tmp_path / "bill")
    assert verify_export(folder) == []
    assert str(racing) not in (folder / USAGE).read_text()


async def test_a_bill_without_its_rows_has_no_export(database: Database, tmp_path: Path) -> None:
    tenant = await make_billed_tenant(database)
    await tenant.use(JANUARY.begin, 1000)
    invoice = await finalize(tenant)
    with psycopg.connect(database.url) as owner:
        owner.execute("SET session_replication_role = replica")
        owner.execute("DELETE FROM usage_records")
    with pytest.raises(UsageIncomplete, match="2026-01"):
        await export(database, invoice.id, tmp_path / "bill")
    assert not (tmp_path / "bill").exists()


async def test_a_void_bill_is_recomputed_too(database: Database, tmp_path: Path) -> None:
    tenant = await busy_tenant(database)
    invoice = await finalize(tenant)
    await void(database, invoice.id)
    await finalize(tenant)
    assert verify_export(await export(database, invoice.id, tmp_path / "bill")) == []


async def test_a_draft_has_no_export(database: Database, tmp_path: Path) -> None:
    tenant = await make_billed_tenant(database)
    await tenant.use(JANUARY.begin, 1)
    async with unit_of_work(database, system_actor("test"), None, None) as uow:
        invoice = await invoices.draft(uow, tenant.id, JANUARY, "USD", JANUARY.end)
    assert invoice is not None
    with pytest.raises(InvoiceStateForbids):
        await export(database, invoice.id, tmp_path / "bill")
