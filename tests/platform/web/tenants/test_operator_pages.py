"""Tenants: list, creation with the key that is shown once, forms that are refused without a loss, steps that ask first."""

import re
from uuid import uuid4

import pytest
from tests.platform.web.browser import Browser, Console, Page, SignedIn
from tests.tenants.people.people_world import add_person

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.audit_queries import audit_entries
from loraplex.tenants.quotas.delegated_quotas import QuotaRepository

AREA = "/operator/console"
NEW = {"name": "harbor", "tier": "gold", "weight": "2.5"}


async def create(browser: Browser, **fields: str) -> Page:
    answer = await browser.submit(f"{AREA}/tenants/new", f"{AREA}/tenants", {**NEW, **fields})
    assert answer.status_code == 200, answer.text
    return Page(answer)


async def actions(console: Console) -> list[str]:
    """What was changed, in order, but for people who signed in."""
    async with console.database.as_operator() as session:
        entries = await audit_entries(session, None, {}, None, 50)
        return [row.action for row in reversed(entries) if not row.action.startswith("session.")]


async def test_tenants_of_every_role_never_reach_the_area(console: Console, signed_in: SignedIn) -> None:
    tenant_id = await console.tenant("harbor")
    address = f"{AREA}/tenants/{tenant_id}"
    for role in ("admin", "developer", "billing", "viewer"):
        browser = await signed_in(role)
        for path in (AREA, f"{AREA}/tenants/new", address, f"{address}/delete"):
            assert (await browser.get(path)).status_code == 303, (role, path)
        for path in (f"{AREA}/tenants", f"{address}/limits", f"{address}/suspend", f"{address}/look"):
            refused = await browser.post(path, {**NEW, "csrf": browser.session.csrf_token})
            assert refused.status_code in (303, 401, 403), (role, path)
    assert await actions(console) == []


async def test_the_first_key_is_shown_once(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in("operator")
    empty = await browser.page(AREA)
    assert "No tenants yet" in empty.text and "loraplex tenant create harbor" in empty.text
    form = (await browser.page(f"{AREA}/tenants/new")).form(f"{AREA}/tenants")
    first = await browser.post(f"{AREA}/tenants", {**form, **NEW})
    again = await browser.post(f"{AREA}/tenants", {**form, **NEW})
    keys = [re.findall(r"lpx_live_\w+", answer.text) for answer in (first, again)]
    assert keys[0] == keys[1] != [] and first.headers["cache-control"] == "no-store"
    assert await actions(console) == ["tenant.create"]
    assert console.dependencies.policy_publisher is not None
    page = await browser.page(AREA)
    assert page.texts("tbody th") == ["harbor"] and page.texts("tbody td")[:2] == ["active", "gold"]
    detail = await browser.page(str(page.find("tbody th a").attributes["href"]))
    assert keys[0][0] not in detail.response.text and "2.5" in detail.response.text
    assert "No name begins with" in (await browser.page(f"{AREA}?name=x%3Cb%3E")).text


async def test_the_list_goes_on_behind_the_last_name(console: Console, signed_in: SignedIn) -> None:
    for number in range(51):
        await console.tenant(f"t{number:02}")
    browser = await signed_in("operator")
    first = await browser.page(f"{AREA}?name=t")
    (following,) = (str(link.attributes["href"]) for link in first.all("nav[aria-label=Pages] a"))
    assert len(first.all("tbody tr")) == 50 and following.startswith(f"{AREA}?name=t&after=")
    second = await browser.page(following)
    assert second.texts("tbody th") == ["t50"]
    (back,) = (link.attributes["href"] for link in second.all("nav[aria-label=Pages] a"))
    assert back == f"{AREA}?name=t"
    assert (await browser.get(f"{AREA}?after=t49")).status_code == 400


async def test_the_first_person_is_invited_from_the_tenants_page(
    console: Console, signed_in: SignedIn
) -> None:
    tenant_id = await console.tenant("harbor")
    browser, address = await signed_in("operator"), f"{AREA}/tenants/{tenant_id}"
    assert "Peopleno admin yet" in (await browser.page(address)).text
    refused = Page(await browser.submit(address, f"{address}/people", {"email": "nobody"}))
    assert refused.response.status_code == 422 and refused.find("#email-e")
    shown = Page(await browser.submit(address, f"{address}/people", {"email": "mira@harbor.example"}))
    link = shown.find("#link").text()
    assert link.startswith("http://console.test/console/sign-in?token=")
    assert shown.find("a.primary").attributes["href"] == address
    accepting = await console.browser()
    page = Page(await accepting.get(link.removeprefix("http://console.test")))
    assert "mira@harbor.example" in page.response.text and "harbor" in page.response.text
    await add_person(console.database, "ada@harbor.example", roles={tenant_id: "admin"})
    assert "Peoplean admin has joined" in (await browser.page(address)).text
    assert await actions(console) == ["user.invite"]
    missing = await browser.post(f"{AREA}/tenants/{uuid4()}/people", {"csrf": browser.session.csrf_token})
    assert missing.status_code in (403, 404)


@pytest.mark.parametrize(
    ("fields", "name", "message"),
    [
        ({"name": "Harbor <b>"}, "name", "not allowed"),
        ({"name": "taken"}, "", "exists already"),
        ({"name": ""}, "name", "Enter a value."),
        ({"tier": "GOLD"}, "tier", "not allowed"),
        ({"weight": "0"}, "weight", "too little"),
    ],
)
async def test_what_was_typed_is_shown_again_with_its_error(
    console: Console, signed_in: SignedIn, fields: dict[str, str], name: str, message: str
) -> None:
    await console.tenant("taken")
    browser = await signed_in("operator")
    answer = await browser.submit(f"{AREA}/tenants/new", f"{AREA}/tenants", {**NEW, **fields})
    page = Page(answer)
    assert answer.status_code == 422
    assert message in page.find(f"#{name}-e" if name else ".note.bad").text()
    for typed, value in fields.items():
        assert page.find(f"input[name={typed}]").attributes.get("value", "") == value
    assert await actions(console) == []


async def test_limits_tier_and_billing_data(console: Console, signed_in: SignedIn) -> None:
    tenant_id = await console.tenant("harbor")
    browser, address = await signed_in("operator"), f"{AREA}/tenants/{tenant_id}"
    limits = {"requests_per_minute": "60", "budget_per_month": "30.50", "default_max_tokens": "0"}
    stale = (await browser.page(address)).form(f"{address}/limits")
    saved = await browser.submit(address, f"{address}/limits", limits)
    assert (saved.status_code, saved.headers["location"]) == (303, address)
    page = await browser.page(address)
    assert "The limits apply to the next request" in page.find(".toasts").text()
    shown = page.form(f"{address}/limits")
    assert (shown["budget_per_month"], shown["default_max_tokens"]) == ("30.5", "0")
    async with console.database.as_operator() as session:
        stored = (await QuotaRepository(session, tenant_id).tenant()).limits
    assert (stored.requests_per_minute, stored.budget_per_month, stored.max_keys) == (60, 30_500_000, None)
    assert stored.default_max_tokens == 0
    assert console.dependencies.admission_controller.published == [tenant_id]  # type: ignore[attr-defined]
    for wrong in ({"budget_per_month": "-5"}, {"budget_per_month": "1.1234567"}, {"tokens_per_day": "many"}):
        refused = await browser.submit(address, f"{address}/limits", wrong)
        (name, typed), page = next(iter(wrong.items())), Page(refused)
        assert refused.status_code == 422 and page.find(f"#{name}-e")
        assert page.find(f"input[name={name}]").attributes["value"] == typed
    moved = await browser.post(f"{address}/limits", {**stale, "requests_per_minute": "1"})
    assert moved.status_code == 422 and "It has changed since it was read" in moved.text
    tier = await browser.submit(
        address, f"{address}/tier", {"tier": "gold", "weight": "4", "unknown_parameters": "report"}
    )
    texts = {"customer_name": "<i>Harbor</i>", "customer_address": "Kai 1\nHamburg", "currency": "EUR"}
    billing = await browser.submit(
        address, f"{address}/billing", {**texts, "tax_rate_ppm": "19", "minimum_micro": "5"}
    )
    assert (tier.status_code, billing.status_code) == (303, 303)
    page = await browser.page(address)
    assert (
        not page.all("main i")
        and page.find("input[name=customer_name]").attributes["value"] == "<i>Harbor</i>"
    )
    assert page.form(f"{address}/tier")["unknown_parameters"] == "report"
    form = page.form(f"{address}/billing")
    assert (form["tax_rate_ppm"], form["minimum_micro"], form["currency"]) == ("19", "5", "EUR")
    assert await actions(console) == ["quotas.change", "tenant.change_tier", "billing.change"]


async def test_a_tenant_is_deleted_by_its_typed_name_only(console: Console, signed_in: SignedIn) -> None:
    tenant_id = await console.tenant("harbor")
    browser, address = await signed_in("operator"), f"{AREA}/tenants/{tenant_id}"
    for step, state in (("suspend", "suspended"), ("resume", "active")):
        asked = await browser.page(f"{address}/{step}")
        assert asked.find("form .btn").attributes["href"] == address
        assert asked.form(f"{address}/{step}").get("end_running") == ("on" if step == "suspend" else None)
        assert (await browser.submit(f"{address}/{step}", f"{address}/{step}")).headers["location"] == address
        assert (await browser.page(address)).find("h1 ~ .sub .chip").text() == state
        looks = (await browser.page(address)).all(f'form[action="{address}/look"]')
        assert len(looks) == (1 if state == "active" else 0)
    for typed in ("", "harbour", "HARBOR"):
        refused = await browser.submit(f"{address}/delete", f"{address}/delete", {"typed": typed})
        assert refused.status_code == 422 and "This is not harbor." in refused.text
    deleted = await browser.submit(f"{address}/delete", f"{address}/delete", {"typed": "harbor"})
    assert deleted.headers["location"] == AREA
    page = await browser.page(address)
    assert "This tenant is deleted since" in page.text and not page.all("main form")
    assert await actions(console) == ["tenant.suspend", "tenant.resume", "tenant.delete"]
    async with console.database.as_operator() as session:
        assert await TenantRepository(session).list() == []
    for path in (f"{AREA}/tenants/1", f"{AREA}/tenants/{uuid4()}", f"{AREA}/tenants/{uuid4()}/suspend"):
        assert (await browser.get(path)).status_code == 404


async def test_an_operator_looks_into_a_tenant_and_changes_nothing(
    console: Console, signed_in: SignedIn
) -> None:
    tenant_id = await console.tenant("harbor")
    browser, address = await signed_in("operator"), f"{AREA}/tenants/{tenant_id}"
    assert (await browser.get("/console/billing")).status_code == 303
    looking = await browser.submit(address, f"{address}/look")
    assert (looking.status_code, looking.headers["location"]) == (303, "/console")
    assert (await actions(console))[-1] == "tenant.view"
    page = await browser.page("/console/billing")
    assert "You look into harbor as an operator." in page.find("main .note.warn").text()
    assert not page.all("main .note.warn button")
    refused = await browser.get("/console/audit")
    assert refused.status_code == 403 and "read-only" in refused.text
    assert "In harbor, this needs a role with the scope" in refused.text
    assert (await browser.page(AREA)).texts("tbody th") == ["harbor"]
    admin = await signed_in("admin")
    log = await admin.page("/console/audit?action=tenant.view")
    assert log.texts("tbody td")[0] == f"operator {browser.session.email}"
    assert log.texts("tbody td.p3") == ["–"]
    for role in ("admin", "operator"):
        other = await signed_in(role, "other")
        assert (await other.get("/console/billing")).status_code == (200 if role == "admin" else 303)
