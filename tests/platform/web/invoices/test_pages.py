"""Billing: prices, the draft, invoices in three formats, credits; for the roles that may see money, and of one tenant only."""

from datetime import timedelta
from uuid import UUID

from tests.platform.web.browser import Console, SignedIn
from tests.tenants.invoices.billed_tenant import BilledTenant, bill, last_month, now

from loraplex.tenants.actors import system_actor
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.invoices import use_cases as invoices
from loraplex.tenants.registry.adapters import AdapterRepository
from loraplex.tenants.unit_of_work import unit_of_work


async def billed(console: Console, name: str = "harbor", currency: str = "USD") -> BilledTenant:
    prices = {currency: Price(prompt=1_500_000, cached_prompt=150_000, completion=6_000_001)}
    return await bill(console.database, await console.tenant(name), prices)


async def finalize(console: Console, tenant: BilledTenant) -> UUID:
    async with unit_of_work(console.database, system_actor("test"), None, None) as uow:
        return (await invoices.finalize(uow, tenant.id, last_month(), now=now())).id


async def test_roles(signed_in: SignedIn) -> None:
    for role, status in (("admin", 200), ("billing", 200), ("developer", 403), ("viewer", 403)):
        browser = await signed_in(role)
        for path in ("/console/billing", "/console/billing/invoices/draft"):
            assert (await browser.get(path)).status_code == status, role
        entry = (await browser.page("/console/account")).texts('nav a[href="/console/billing"]')
        assert entry == (["Billing"] if status == 200 else [])
    assert (await (await signed_in("operator")).get("/console/billing")).status_code == 303


async def test_without_usage_it_says_when_the_first_draft_appears(signed_in: SignedIn) -> None:
    page = await (await signed_in("billing")).page("/console/billing")
    assert "The first draft appears with the first request." in page.text
    assert "No price is in force in XXX" in page.text
    assert "No credits." in page.text and "No budget was crossed." in page.text


async def test_a_month_from_its_draft_to_its_invoice(console: Console, signed_in: SignedIn) -> None:
    tenant = await billed(console)
    async with console.database.as_tenant(tenant.id) as session:
        adapter = await AdapterRepository(session, tenant.id).create("pirate")
    await tenant.use(last_month().begin, 2_000_000, adapter_id=adapter.id)
    await tenant.use(now(), 1_000_000)
    async with unit_of_work(console.database, system_actor("test"), None, None) as uow:
        await invoices.grant_credit(
            uow, tenant.id, 500_000, "<b>welcome</b>", expires_at=now() + timedelta(days=90)
        )
    identity = await finalize(console, tenant)
    browser = await signed_in("billing")
    page = await browser.page("/console/billing")
    assert page.texts(".stat .value")[:3] == ["$1.50", "$1.50", "$0.00"]
    (number,) = page.all(f'a[href="/console/billing/invoices/{identity}"]')
    assert number.text() == "1" and "$2.50" in page.text
    assert "<b>welcome</b>" in page.text and not page.all("main table td b")
    assert "$1.500" in page.text and page.all('[title="1,500,000 micro-units"]')
    invoice = await browser.page(f"/console/billing/invoices/{identity}")
    assert invoice.find("h1").text() == f"Invoice 1, {last_month().begin:%B %Y}"
    assert invoice.texts("tfoot td.num") == ["$3.000000", "−$0.500000", "$2.50"]
    assert "loraplex invoice verify" in invoice.text
    draft = await browser.page("/console/billing/invoices/draft")
    assert draft.find("h1").text() == f"Draft, {now():%B %Y}"
    for name in ("json", "csv", "html"):
        for path in (f"{identity}/{name}", f"draft/{name}"):
            assert (await browser.get(f"/console/billing/invoices/{path}")).status_code == 200
    printed = await browser.get(f"/console/billing/invoices/{identity}/html")
    assert "style-src 'sha256-" in printed.headers["content-security-policy"]
    saved = await browser.get(f"/console/billing/invoices/{identity}/json")
    assert saved.json()["total"] == "2.50"
    assert saved.headers["content-disposition"] == f'attachment; filename="invoice-{identity}.json"'
    for path in (f"invoices/{identity}/pdf", "invoices/nothing", f"invoices/{tenant.id}"):
        assert (await browser.get(f"/console/billing/{path}")).status_code == 404
    other = await signed_in("admin", "other")
    assert (await other.get(f"/console/billing/invoices/{identity}")).status_code == 404


async def test_other_currencies_are_written_with_their_digits(console: Console, signed_in: SignedIn) -> None:
    for name, currency, amount in (
        ("zurich", "CHF", "CHF\u00a01.50"),
        ("tokyo", "JPY", "JPY\u00a02"),
        ("kuwait", "KWD", "KWD\u00a01.500"),
    ):
        tenant = await billed(console, name, currency)
        await tenant.use(now(), 1_000_000, currency=currency)
        page = await (await signed_in("billing", name)).page("/console/billing")
        assert page.all(".stat .value")[0].text() == amount
