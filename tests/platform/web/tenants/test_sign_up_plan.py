"""The sign-up plan: published with a tier that has a price, changed, and closed; each in the audit log."""

from tests.platform.web.browser import Console, Page, SignedIn

from loraplex.tenants.actors import system_actor
from loraplex.tenants.billing import use_cases as rate_cards
from loraplex.tenants.billing.price_table import CardKey
from loraplex.tenants.billing.pricing import Price
from loraplex.tenants.people.sign_up import is_open
from loraplex.tenants.unit_of_work import unit_of_work

PLAN = "/operator/console/plan"


async def test_an_operator_opens_changes_and_closes_sign_up(console: Console, signed_in: SignedIn) -> None:
    operator = await signed_in("operator")
    page = await operator.page(PLAN)
    assert "No person opens a tenant" in page.text and "no mail server" in page.text
    refused = await operator.submit(PLAN, PLAN, {"tier": "free"})
    assert refused.status_code == 422
    assert Page(refused).texts("#tier-e") == ["No rate card applies to the tier free: create one first."]
    price = Price(prompt=300_000, cached_prompt=100_000, completion=700_000)
    async with unit_of_work(console.database, system_actor("test"), None, None) as uow:
        await rate_cards.create(uow, CardKey("free", None, None, "USD"), price)
    sent = {"tier": "free", "weight": "0.5", "tokens_per_day": "1000", "budget_per_month": "2.50"}
    opened = await operator.submit(PLAN, PLAN, sent)
    assert opened.headers["location"] == PLAN and await is_open(console.database)
    page = await operator.page(PLAN)
    shown = page.form(PLAN)
    assert {name: shown[name] for name in sent} == {**sent, "budget_per_month": "2.5"}
    assert page.texts("tbody tr > *") == ["this tier, USD", "coming", "$0.300", "$0.700"]
    wrong = await operator.submit(PLAN, PLAN, {"tier": "free", "tokens_per_day": "many"})
    assert wrong.status_code == 422 and Page(wrong).find("#tokens_per_day").attributes["value"] == "many"
    assert (await operator.submit(PLAN, f"{PLAN}/close")).headers["location"] == PLAN
    assert not await is_open(console.database)
    audit = (await operator.page("/operator/console/audit")).text
    assert "sign_up.publish" in audit and "sign_up.close" in audit
