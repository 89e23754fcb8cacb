"""The usage of all tenants: its table and its chart have the same totals, in one currency at a time, of at most 92 days."""

from datetime import UTC, datetime

from tests.platform.web.browser import Console, Page
from tests.tenants.invoices.billed_tenant import make_billed_tenant

from loraplex.tenants.billing.pricing import Price

PATH = "/operator/console/usage"


async def test_tenants_add_up_in_each_currency_and_a_range_is_bounded(console: Console) -> None:
    now = datetime.now(UTC)
    browser = await console.signed_in("operator")
    assert "No requests in this time" in (await browser.page(PATH)).text
    for name, tokens in (("one", 1_000_000), ("two", 3_000_000)):
        await (await make_billed_tenant(console.database, name)).use(now, tokens)
    euros = await make_billed_tenant(console.database, "euros", {"EUR": Price(prompt=7_000_000)})
    await euros.use(now, 1_000_000, currency="EUR")
    for query, tenants, charged in (
        ("", ["two", "one"], ["$4.5000", "$1.5000", "$6.0000"]),
        ("?currency=EUR", ["euros"], ["€7.0000", "€7.0000"]),
    ):
        page = await browser.page(PATH + query)
        assert page.texts("[aria-label='Usage by tenant'] tbody th") == tenants
        assert page.texts("[aria-label='Usage by tenant'] td:last-child") == charged
        assert page.texts("#t-amount tfoot td")[-1] == charged[-1]
    assert page.texts(".note a") == ["show USD"]
    longer = "from=2026-01-01&to=2026-04-03"
    refused = await browser.get(f"{PATH}?{longer}")
    assert refused.status_code == 422 and "From 1 to 92 days" in Page(refused).find("#to-e").text()
    assert (await browser.get(f"{PATH}.csv?{longer}")).status_code == 200
