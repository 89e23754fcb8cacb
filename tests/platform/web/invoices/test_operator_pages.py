"""Rate cards, credits and invoices in the operator area: previews write nothing, what is final asks, a double submit is one effect."""

from datetime import timedelta

from tests.platform.web.browser import Browser, Console, Page, SignedIn
from tests.platform.web.tenants.test_operator_pages import actions
from tests.tenants.invoices.billed_tenant import BilledTenant, bill, last_month, now

from loraplex.platform.web.console.page import ROWS
from loraplex.tenants.actors import system_actor
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.invoices import use_cases
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.unit_of_work import unit_of_work

AREA = "/operator/console"


async def billed(console: Console, name: str = "harbor", currency: str = "USD") -> BilledTenant:
    prices = {currency: Price(prompt=1_500_000, cached_prompt=150_000, completion=6_000_001)}
    return await bill(console.database, await console.tenant(name), prices)


async def test_people_of_tenants_never_reach_it(signed_in: SignedIn) -> None:
    browser = await signed_in("admin")
    for path in ("rate-cards", "rate-cards/new", "credits", "invoices", "invoices/close"):
        assert (await browser.get(f"{AREA}/{path}")).status_code == 303
    for path in ("rate-cards", "credits", "invoices"):
        answer = await browser.post(f"{AREA}/{path}", {"csrf": browser.session.csrf_token})
        assert answer.status_code in (303, 401, 403)


async def test_without_anything_each_page_says_so(signed_in: SignedIn) -> None:
    browser = await signed_in("operator")
    for path, text in (
        ("rate-cards", "No rate cards"),
        ("credits", "No credits were granted."),
        ("invoices", "No invoices"),
    ):
        assert text in (await browser.page(f"{AREA}/{path}")).text


async def test_a_draft_is_rated_then_published_once(console: Console, signed_in: SignedIn) -> None:
    tenant = await billed(console)
    await tenant.use(last_month().begin, 2_000_000)
    browser, path = await signed_in("operator"), f"{AREA}/rate-cards"
    draft = {
        "tenant": "harbor",
        "currency": "USD",
        "prompt": "3.00",
        "cached_prompt": "0.0001",
        "completion": "0",
        "reasoning": "0.0005",
        "effective_from": f"{now() + timedelta(days=2):%Y-%m-%dT%H:%M}",
    }
    answer = await browser.submit(f"{path}/new", f"{path}/preview", draft)
    page = Page(answer)
    assert answer.status_code == 200 and await actions(console) == []
    assert page.texts("tbody td")[:3] == ["$3.0000", "$6.0000", "$3.0000"]
    assert "$3.000 per 1 M tokens: 3,000,000 micro-units in the API" in page.text
    form = page.form(path)
    published = [await browser.post(path, form) for _ in range(2)]
    assert [each.headers["location"] for each in published] == [path, path]
    assert await actions(console) == ["rate-card.create"]
    listed = await browser.page(path)
    assert listed.texts("tbody td:nth-of-type(1)") == ["coming", "in force"]
    assert [text.partition("reasoning")[1] for text in listed.texts("tbody td:last-child")] == [
        "reasoning",
        "",
    ]
    assert (
        "These prices begin" not in listed.text
        and "Published: these prices begin" in listed.find(".toasts").text()
    )
    again = await browser.submit(f"{path}/new", f"{path}/preview", {**draft, "cached_prompt": "9"})
    assert (
        again.status_code == 422 and "at most the price prompt" in Page(again).find("#cached_prompt-e").text()
    )
    for wrong, field, message in (
        ({"tenant": "nowhere"}, "tenant", "There is no tenant nowhere"),
        ({"tier": "gold"}, "tier", "to a tier or to a tenant"),
        ({"tier": "gold", "tenant": ""}, "tier", "There is no tier gold; the tiers are standard."),
        ({"prompt": "0,10"}, "prompt", "“0,10” is no amount"),
        ({"prompt": "0.0000001"}, "prompt", "at most 6 decimals"),
        ({"prompt": "10000.01"}, "prompt", "10000.01 is too much: at most 10000."),
    ):
        refused = await browser.submit(f"{path}/new", f"{path}/preview", {**draft, **wrong})
        assert refused.status_code == 422 and message in Page(refused).find(f"#{field}-e").text()
    form = (await browser.page(listed.find(".section header a").attributes["href"] or "")).form(
        f"{path}/preview"
    )
    assert (form["prompt"], form["cached_prompt"], form["reasoning"]) == ("3", "0.0001", "0.0005")


async def test_a_credit_is_granted_once_and_its_reason_is_text(console: Console, signed_in: SignedIn) -> None:
    await billed(console, currency="EUR")
    browser, path = await signed_in("operator"), f"{AREA}/credits"
    form = (await browser.page(f"{path}?tenant=harbor")).form(path)
    assert form["tenant"] == "harbor"
    credit = {**form, "amount": "25.50", "reason": "<img src=x>", "last_day": "2999-12-30"}
    assert [(await browser.post(path, credit)).status_code for _ in range(2)] == [303, 303]
    page = await browser.page(path)
    assert page.texts("tbody td")[:2] == ["€25.50", "€25.50"] and not page.all("main img")
    assert await actions(console) == ["credit.grant"]
    for wrong, field in (
        ({"amount": "0"}, "amount"),
        ({"amount": "ten"}, "amount"),
        ({"tenant": "nowhere"}, "tenant"),
        ({"last_day": "2001-01-01"}, "last_day"),
        ({"last_day": "9999-12-31"}, "last_day"),
        ({"priority": "101"}, "priority"),
    ):
        refused = await browser.submit(path, path, {**credit, "idempotency_key": f"k-{field}", **wrong})
        assert refused.status_code == 422 and Page(refused).find(f"#{field}-e"), wrong


async def test_credits_are_paged_by_places_that_this_page_has_named(
    console: Console, signed_in: SignedIn
) -> None:
    tenant = await billed(console)
    async with unit_of_work(console.database, system_actor("test"), None, None) as uow:
        for number in range(ROWS + 1):
            await use_cases.grant_credit(uow, tenant.id, 1_000_000, f"credit {number}")
    browser, path = await signed_in("operator"), f"{AREA}/credits"
    first = await browser.page(path)
    reasons = first.texts("tbody tr td:last-child")
    assert reasons == [f"credit {number}" for number in range(ROWS, 0, -1)]
    (older,) = first.all('nav[aria-label="Pages"] a')
    address = older.attrs["href"]
    assert address is not None and address.startswith(f"{path}?after=")
    last = await browser.page(address)
    assert last.texts("tbody tr td:last-child") == ["credit 0"]
    assert last.texts('nav[aria-label="Pages"] a') == ["Newer"]
    assert (await browser.get(f"{AREA}/invoices?{address.partition('?')[2]}")).status_code == 400
    assert (await browser.get(f"{path}?after={tenant.id}")).status_code == 400


async def close(browser: Browser, tenant: str) -> str:
    path = f"{AREA}/invoices"
    month = {"tenant": tenant, "month": str(last_month())}
    preview = Page(await browser.submit(f"{path}/close", f"{path}/preview", month))
    answer = await browser.post(path, preview.form(path))
    assert answer.status_code == 303, answer.text
    return answer.headers["location"]


async def test_a_month_is_previewed_made_final_and_paid(console: Console, signed_in: SignedIn) -> None:
    tenant = await billed(console)
    await tenant.use(last_month().begin, 2_000_000)
    browser, path = await signed_in("operator"), f"{AREA}/invoices"
    preview = await browser.submit(
        f"{path}/close", f"{path}/preview", {"tenant": "harbor", "month": str(last_month())}
    )
    assert preview.status_code == 200 and "$3.00" in preview.text and await actions(console) == []
    address = await close(browser, "harbor")
    page = await browser.page(address)
    assert page.find("h1").text() == f"Invoice 1, {last_month().begin:%B %Y}"
    listed = await browser.page(f"{path}?tenant=harbor&state=final")
    assert listed.texts("tbody td")[:4] == ["harbor", str(last_month()), "final", "$3.00"]
    unknown = await browser.get(f"{path}?tenant=nowhere")
    assert unknown.status_code == 422 and "There is no tenant nowhere" in unknown.text
    for name in ("json", "csv", "html"):
        assert (await browser.get(f"{address}/{name}")).status_code == 200
    paid = await browser.submit(address, f"{address}/paid", {"reference": "SEPA <1>"})
    assert paid.headers["location"] == address
    page = await browser.page(address)
    assert "SEPA <1>" in page.text and not page.all("main form")
    void = await browser.submit(f"{address}/actions/void", f"{address}/actions/void", {"typed": "harbor"})
    assert void.status_code == 422 and "The invoice is paid" in void.text
    assert await actions(console) == ["invoice.finalize", "invoice.pay"]
    goes_on = await browser.submit(
        f"{path}/close",
        f"{path}/preview",
        {"tenant": "harbor", "month": str(Month.of(now())), "currency": "USD"},
    )
    assert goes_on.status_code == 200 and not Page(goes_on).all(f'form[action="{path}"]')


async def test_an_invoice_is_voided_by_the_typed_name_only(console: Console, signed_in: SignedIn) -> None:
    tenant = await billed(console)
    await tenant.use(last_month().begin, 2_000_000)
    browser = await signed_in("operator")
    address = await close(browser, "harbor")
    action = f"{address}/actions/void"
    assert f'href="{action}"' in (await browser.get(address)).text
    refused = await browser.submit(action, action, {"typed": "Harbor"})
    assert refused.status_code == 422 and "This is not harbor." in refused.text
    assert (await browser.submit(action, action, {"typed": "harbor"})).headers["location"] == address
    assert (await browser.page(address)).texts("dl.pairs .chip") == ["void"]
    assert await actions(console) == ["invoice.finalize", "invoice.void"]
