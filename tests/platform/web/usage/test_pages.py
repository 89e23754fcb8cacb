"""The usage page: its numbers and its downloads are those of the API, and its filters say what they do not allow."""

import csv
import io
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from tests.platform.web.browser import Console
from tests.platform.web.observed_tenant import ObservedTenant, observed_tenant

from loraplex.platform.web.console.formatting import count, money_spent, money_sum
from loraplex.tenants.database import Database
from loraplex.tenants.invoices.invoices import InvoiceRepository
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.ledger.failed_requests import Refused
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.ledger.usage_reports import UsageQuery, UsageSums, usage_totals

NOON = datetime(2026, 11, 20, 14, 30, tzinfo=UTC)
DAYS = "from=2026-11-20&to=2026-11-20"


async def totals(database: Database, seen: ObservedTenant, key_id: str | None = None) -> UsageSums:
    start = NOON.replace(hour=0, minute=0)
    query = UsageQuery(
        tenant_id=seen.id,
        key_id=key_id,
        start=start,
        end=start.replace(day=21),
        bucket="1d",
        group_by=frozenset(),
    )
    async with database.as_tenant(seen.id) as session:
        return (await usage_totals(session, query)).get("USD", UsageSums())


@pytest.mark.parametrize("split", ["adapter", "key", "class"])
async def test_the_page_and_its_downloads_have_the_totals_of_the_api(
    console: Console, database: Database, split: str
) -> None:
    seen, other = observed_tenant(database.url, NOON), observed_tenant(database.url, NOON)
    browser, expected = await console.signed_in("viewer", seen.tenant.name), await totals(database, seen)
    page = await browser.page(f"/console/usage?{DAYS}&split={split}&bucket=1h")
    tiles = dict(zip(page.texts(".stat dt"), page.texts(".stat .note-line"), strict=True))
    assert page.texts(".stat .value")[:2] == [money_spent(expected.amount_pico, "USD"), "5"]
    assert tiles["Prompt tokens"] == count(expected.prompt_tokens)
    assert page.texts("tfoot td")[-1] == money_sum(expected.amount_pico, "USD")
    drawn = [int(cell.attributes["data-v"] or "") for cell in page.all("#t-amount td[data-v]")]
    assert abs(sum(drawn) - expected.amount_pico // 10**6) <= len(drawn)
    # Every hour of a day that is over, also those without requests.
    assert len(page.all("#t-amount tbody tr")) == 24 and len(drawn) == len(page.all("#t-amount tbody .p3"))
    links = [node.attributes["href"] or "" for node in page.all("a[download]")]
    rows = list(csv.DictReader(io.StringIO((await browser.get(links[0])).text)))
    documents = (await browser.get(links[1])).json()
    for found in (rows, documents):
        assert sum(int(row["amount_pico"]) for row in found) == expected.amount_pico
    assert rows[0].keys() - documents[0].keys() == {"key_name", "amount"}
    assert sum(Decimal(row["amount"]) for row in rows) * 10**12 == expected.amount_pico
    assert {row["key_name"] for row in rows} == ({"k"} if split == "key" else {""})
    assert other.key_id not in page.response.text


async def test_what_was_refused_stands_beside_the_requests(console: Console, database: Database) -> None:
    seen, ledger = observed_tenant(database.url, NOON), UsageLedger(database)
    (_, key), other = next(iter(seen.tenant.keys.items())), [*seen.tenant.keys.values()][1]
    for api_key_id, adapter_id, number in ((key, None, 2825), (other, seen.tenant.adapters["coral"], 4)):
        refused = Refused(NOON.replace(minute=0), seen.id, api_key_id, adapter_id, "refused_overloaded")
        await ledger.count_refusals({refused: number})
    await ledger.close()
    # The tenant has four more, of requests whose model was not known yet.
    browser = await console.signed_in("viewer", seen.tenant.name)
    for asked, requests, number in (("", 5, 2829 + 4), ("&adapter=coral", None, 4)):
        page = await browser.page(f"/console/usage?{DAYS}{asked}")
        tiles = dict(zip(page.texts(".stat dt"), page.texts(".stat .note-line"), strict=True))
        assert tiles["Requests"] == f"finished; {count(number)} more refused"
        assert requests is None or page.texts(".stat .value")[1] == str(requests)


async def test_the_totals_of_a_month_are_those_of_its_invoice(console: Console, database: Database) -> None:
    seen = observed_tenant(database.url, NOON)
    async with database.as_tenant(seen.id) as session:
        invoice = await InvoiceRepository(session, seen.id).preview(seen.id, Month.of(NOON), "USD")
    page = await (await console.signed_in("billing", seen.tenant.name)).page("/console/usage?to=2026-11-30")
    billed = sum(line.amount_pico for line in invoice.content.totals.lines)
    assert page.texts("tfoot td")[-1] == money_sum(billed, "USD") and billed > 0


async def test_filters_and_what_they_do_not_allow(console: Console, database: Database) -> None:
    seen = observed_tenant(database.url, NOON)
    browser = await console.signed_in("billing", seen.tenant.name)
    unused = list(seen.tenant.keys)[1]
    empty = await browser.page(f"/console/usage?{DAYS}&key={unused}")
    assert "No requests in this time." in empty.text and empty.texts(".stat .value")[0] == "$0.00"
    chosen = await browser.page(f"/console/usage?{DAYS}&adapter=coral")
    assert chosen.texts(".stat .value")[1] == "1" and not chosen.all("a[href^='/console/adapters/']")
    cut = await browser.page("/console/usage?from=2026-11-01&to=2026-11-21&bucket=1h")
    assert "at most 7 days" in cut.text and cut.find("#from").attributes["value"] == "2026-11-15"
    for query, message in (
        ("from=x", "“x” is no day."),
        ("from=2026-11-20&to=2026-11-19", "must not be after"),
        ("from=2020-01-01&to=2026-11-19", "At most 400 days"),
    ):
        response = await browser.get(f"/console/usage?{query}")
        assert response.status_code == 422 and message in response.text
        for download in ("csv", "json"):
            refused = await browser.get(f"/console/usage.{download}?{query}")
            assert refused.status_code == 422 and "Field from: " in refused.text and message in refused.text
