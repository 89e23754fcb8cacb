"""Invoices and credits over HTTP: what an operator does, its tenant reads, in three formats."""

import csv
import io
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import pytest
from tests.platform.use_cases.walked_world import World, open_world
from tests.platform.web.invoices.drafted_invoice import draft_invoice
from tests.tenants.invoices.billed_tenant import bill

from loraplex.platform.web.invoices.invoice_formats import CONTENT_SECURITY_POLICY
from loraplex.tenants.invoices.months import Month

JANUARY = Month(2026, 1)


@pytest.fixture
async def world(database_url: str, valkey_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(database_url, valkey_url, tmp_path) as opened:
        await opened.begin()
        yield opened


async def test_a_bill_from_its_preview_to_its_payment(world: World) -> None:
    tenant = await bill(world.database, world.tenant_id)
    await tenant.use(JANUARY.begin, 10**7, 5, 3)
    granted = await world.operator(
        "POST",
        f"/tenants/{tenant.id}/credits",
        {"amount_micro": 4_000_000, "priority": 3, "reason": "welcome"},
    )
    assert granted.document["currency"] == "USD" and granted.document["available_micro"] == 4_000_000
    body = {"tenant_id": str(tenant.id), "month": "2026-01"}
    before = world.dump()
    preview = (await world.operator("POST", "/invoices/preview", body)).document
    assert world.dump() == before
    assert (preview["state"], preview["number"], preview["total_micro"]) == ("draft", None, 11_000_000)
    final = (await world.operator("POST", "/invoices/finalize", body)).document
    changed = {name for name, value in final.items() if value != preview[name]}
    assert changed == {"state", "number", "grace_ends_at", "finalized_at"}
    assert [line["token_class"] for line in final["lines"]] == [
        "cached_prompt",
        "completion",
        "uncached_prompt",
    ]
    assert sum(line["amount_micro"] for line in final["lines"]) == final["subtotal_micro"]
    assert final["lines"][2]["amount_pico"] == str(10**7 * 1_500_000)
    paid = await world.operator("POST", f"/invoices/{final['id']}/paid", {"reference": "SEPA 1"})
    assert paid.document["state"] == "paid" and paid.document["lines"] == final["lines"]
    own = (await world.tenant("GET", f"/billing/invoices/{final['id']}")).document
    assert own == paid.document
    (summary,) = (await world.tenant("GET", "/billing/invoices?state=paid&month=2026-01")).document["data"]
    assert (summary["id"], summary["total"]) == (final["id"], "11.00")
    assert (await world.operator("GET", f"/invoices?tenant_id={tenant.id}")).document["data"] == [summary]
    assert (await world.operator("GET", "/invoices?state=void")).document["data"] == []
    (credit,) = (await world.tenant("GET", "/billing/credits")).document["data"]
    assert credit == granted.document | {"available_micro": 0}
    assert (await world.operator("GET", f"/tenants/{tenant.id}/credits")).document["data"] == [credit]


async def test_a_draft_is_read_by_its_tenant_as_it_would_be_now(world: World) -> None:
    tenant = await bill(world.database, world.tenant_id)
    await tenant.use(JANUARY.begin, 10**6)
    identity = await draft_invoice(world.database, tenant.id)
    for tokens in (2, 3):
        await tenant.use(JANUARY.begin, 10**6)
        found = (await world.tenant("GET", f"/billing/invoices/{identity}")).document
        assert (found["state"], found["lines"][0]["tokens"]) == ("draft", tokens * 10**6)


async def test_an_invoice_is_also_csv_and_a_page_to_print(world: World) -> None:
    tenant = await bill(world.database, world.tenant_id)
    await tenant.use(JANUARY.begin, 10**6)
    identity = await draft_invoice(world.database, tenant.id)
    headers = {"authorization": f"Bearer {world.admin_key}"}
    path = f"/tenant/v1/billing/invoices/{identity}"
    as_csv = await world.client.get(path, params={"format": "csv"}, headers=headers)
    assert as_csv.headers["content-type"] == "text/csv; charset=utf-8"
    assert as_csv.headers["content-disposition"] == f'attachment; filename="invoice-{identity}.csv"'
    assert [row["kind"] for row in csv.DictReader(io.StringIO(as_csv.text))][:2] == ["usage", "subtotal"]
    page = await world.client.get(path, params={"format": "html"}, headers=headers)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert page.headers["x-content-type-options"] == "nosniff"
    for query in ("format=pdf", "format=csv&format=csv", "size=3"):
        assert (await world.client.get(f"{path}?{query}", headers=headers)).status_code == 400


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"month": "2026-13"}, 400, "month"),
        ({"month": "2026-01", "currency": "usd"}, 400, "currency"),
        ({"month": "2026-01"}, 409, None),
        ({"month": "2099-12"}, 409, None),
    ],
)
async def test_what_cannot_be_finalized_is_refused(
    world: World, body: dict[str, str], status: int, param: str | None
) -> None:
    refused = await world.operator("POST", "/invoices/finalize", {"tenant_id": str(world.tenant_id), **body})
    assert refused.detail.startswith(str(status)) and refused.document["error"]["param"] == param


@pytest.mark.parametrize("query", ["state=open", "month=2026-13", "month=2026"])
async def test_a_filter_that_selects_nothing_ever_is_refused(world: World, query: str) -> None:
    param = query.partition("=")[0]
    for plane, path in ((world.operator, "/invoices"), (world.tenant, "/billing/invoices")):
        refused = await plane("GET", f"{path}?{query}")
        assert refused.detail.startswith("400") and refused.document["error"]["param"] == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("expires_at", "9999-12-31T23:59:59-14:00"),
        ("expires_at", "2999-01-01"),
        ("expires_at", "2020-01-01T00:00:00Z"),
        ("currency", "EURO"),
        ("amount_micro", 10**15 + 1),
    ],
)
async def test_a_credit_that_cannot_be_granted_is_refused(world: World, field: str, value: str | int) -> None:
    body = {"amount_micro": 1, "reason": "welcome", field: value}
    refused = await world.operator("POST", f"/tenants/{world.tenant_id}/credits", body)
    assert refused.detail.startswith("400") and refused.document["error"]["param"] == field


async def test_an_unknown_tenant_has_no_bill(world: World) -> None:
    body = {"tenant_id": str(UUID(int=9)), "month": "2026-01"}
    for step in ("preview", "finalize"):
        assert (await world.operator("POST", f"/invoices/{step}", body)).detail.startswith("404")
