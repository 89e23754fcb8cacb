"""Signing in, in one and two steps; links that work once; what a stolen, foreign or ended session is worth."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pyotp
import pytest
from tests.platform.sent_statements import sent_statements
from tests.platform.web.browser import ORIGIN, Browser, Console, Page, SignedIn
from tests.tenants.people.people_world import PASSWORD, add_person

from loraplex.platform.auth.failure_buckets import BURST, REFILL_S, FailureBuckets
from loraplex.platform.web.console_app import ConsoleOptions, add_console
from loraplex.tenants.people.accounts import demo_link, invite_operator, reset_user
from loraplex.tenants.people.identity import person_actor
from loraplex.tenants.unit_of_work import unit_of_work

MARA = "mara@harbor.example"
FORM = {"email": MARA, "password": PASSWORD}
POST = {"origin": ORIGIN}


@pytest.fixture
async def harbor(console: Console) -> UUID:
    """A tenant whose admin is `MARA`."""
    tenant_id = await console.tenant("harbor")
    await add_person(console.database, MARA, roles={tenant_id: "admin"})
    return tenant_id


async def test_signing_in_leads_to_the_page_that_was_asked_for(console: Console, harbor: UUID) -> None:
    http = await console.browser()
    page = Page(await http.get("/console/sign-in?next=/console/team%3Fx%3D1"))
    assert page.find("h1").text() == "Sign in" and page.find(".sub .mono").text() == "console.test"
    sent = page.form("/console/sign-in") | FORM
    response = await http.post("/console/sign-in", data=sent, headers=POST)
    assert (response.status_code, response.headers["location"]) == (303, "/console/team?x=1")
    cookie = response.headers["set-cookie"].lower()
    assert cookie.startswith("loraplex=") and "httponly" in cookie and "samesite=lax" in cookie
    assert "path=/" in cookie and "domain" not in cookie and "secure" not in cookie
    assert (await http.get("/console/account")).status_code == 200
    assert (await http.get("/console/sign-in")).headers["location"] == "/console"


async def test_behind_tls_the_cookie_is_bound_to_the_host(console: Console, harbor: UUID) -> None:
    http = await console.browser()
    http.base_url = "https://console.test"
    response = await http.post("/console/sign-in", data=FORM, headers={"origin": "https://console.test"})
    cookie = response.headers["set-cookie"]
    assert cookie.startswith("__Host-loraplex=") and "Secure" in cookie and "Path=/" in cookie
    assert (await http.get("/console/account")).status_code == 200


async def test_a_wrong_pair_keeps_the_address_and_tells_nothing(console: Console, harbor: UUID) -> None:
    http = await console.browser()
    answers = []
    for email in (MARA, "absent@harbor.example"):
        response = await http.post(
            "/console/sign-in", data={"email": email, "password": "wrong"}, headers=POST
        )
        assert response.status_code == 422 and "set-cookie" not in response.headers
        page = Page(response)
        assert page.find("#email").attributes["value"] == email
        assert "value" not in page.find("#password").attributes
        answers.append(page.texts(".error"))
    assert answers == [["Email or password is wrong."]] * 2


async def test_a_sign_in_never_opens_another_site(console: Console, harbor: UUID) -> None:
    for target in (
        "https://evil.example",
        "//evil.example",
        "/\\evil.example",
        "/consolexyz",
        "/operator/v1",
    ):
        http = await console.browser()
        response = await http.post("/console/sign-in", data={**FORM, "next": target}, headers=POST)
        assert response.headers["location"] == "/console"
    fields = {**FORM, "next": "/console/x\nset-cookie: a=b"}
    response = await http.post("/console/sign-in", data=fields, headers={**POST, "hx-request": "true"})
    assert response.headers["hx-redirect"] == "/console/x%0Aset-cookie:%20a=b"


async def test_the_second_factor_is_a_second_step(console: Console, harbor: UUID) -> None:
    person = Browser(await console.browser(), (await console.signed_in("viewer")).session)
    await person.http.post("/console/sign-in", data=FORM, headers=POST)
    asked = "/console/account/second-factor"
    enrolling = Page(await person.submit(asked, asked, {"present": PASSWORD}))
    secret = enrolling.find("#totp-secret").text()
    assert str(enrolling.find("img.qr").attributes["src"]).startswith("data:image/svg+xml;base64,")
    fields = enrolling.form("/console/account/second-factor/confirm")
    wrong = await person.post("/console/account/second-factor/confirm", {**fields, "code": "000000"})
    assert wrong.status_code == 422 and "The code is wrong" in wrong.text and secret not in wrong.text
    now = int(datetime.now(UTC).timestamp())
    first = pyotp.TOTP(secret).at(now - 30)
    done = await person.post("/console/account/second-factor/confirm", {**fields, "code": first})
    assert done.status_code == 200 and len(Page(done).find("#recovery-codes").text().split()) == 10
    assert (await person.page("/console/account")).texts("h2 + p .chip") == ["on"]
    path = "/console/account/second-factor/remove"
    removing = (await person.page(path)).form(path) | {"present": PASSWORD}
    kept = await person.post("/console/account/second-factor/remove", {**removing, "code": "000000"})
    assert kept.status_code == 422 and len(Page(kept).texts(".error")) == 1
    http = await console.browser()
    step = await http.post("/console/sign-in", data=FORM, headers=POST)
    assert step.status_code == 200 and "set-cookie" not in step.headers and PASSWORD not in step.text
    sent = Page(step).form("/console/sign-in")
    again = await http.post("/console/sign-in", data={**sent, "code": first}, headers=POST)
    assert again.status_code == 422 and "used already" in again.text
    sent = Page(again).form("/console/sign-in")
    code = pyotp.TOTP(secret).at(now)
    entered = await http.post("/console/sign-in", data={**sent, "code": code}, headers=POST)
    assert entered.headers["location"] == "/console"
    newest = pyotp.TOTP(secret).at(now + 30)
    removed = await person.post("/console/account/second-factor/remove", {**removing, "code": newest})
    assert removed.status_code == 303
    assert (await person.page("/console/account")).texts("h2 + p .chip") == ["off"]
    for ticket in ("forged", "gefälscht"):
        forged = await (await console.browser()).post(
            "/console/sign-in", data={"ticket": ticket, "code": code}, headers=POST
        )
        assert forged.status_code == 422


async def test_a_sign_in_takes_a_new_token(console: Console, harbor: UUID) -> None:
    http = await console.browser({"loraplex": "chosen-by-another"})
    await http.post("/console/sign-in", data=FORM, headers=POST)
    first = http.cookies["loraplex"]
    http.cookies.clear()
    await http.post("/console/sign-in", data=FORM, headers=POST)
    assert len({"chosen-by-another", first, http.cookies["loraplex"]}) == 3


async def test_signing_out_ends_the_session_on_the_server(signed_in: SignedIn) -> None:
    person = await signed_in("viewer")
    token = person.http.cookies["loraplex"]
    left = await person.submit("/console/account", "/console/sign-out")
    assert left.headers["location"] == "/console/sign-in"
    person.http.cookies.set("loraplex", token, domain="console.test")
    assert (await person.get("/console/account")).status_code == 303


async def test_a_session_works_in_its_own_area_only(console: Console, signed_in: SignedIn) -> None:
    operator, admin = await signed_in("operator"), await signed_in("admin")
    assert (await operator.get("/operator/console/account")).status_code == 200
    assert (await operator.get("/console/account")).status_code == 303
    crossed = await console.browser(
        {
            "loraplex": operator.http.cookies["loraplex-operator"],
            "loraplex-operator": admin.http.cookies["loraplex"],
        }
    )
    for path in ("/console/account", "/operator/console/account"):
        assert (await crossed.get(path)).status_code == 303


@pytest.mark.parametrize("path", ["sign-in", "accept"])
async def test_a_flood_of_forms_without_a_session_reaches_no_database(
    console: Console, harbor: UUID, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    now = 0.0
    monkeypatch.setattr(FailureBuckets.__init__, "__defaults__", (lambda: now,))
    add_console(console.app, console.dependencies, ConsoleOptions())
    http = await console.browser()
    sent: Any = {"data": {"token": "x", "password": PASSWORD}, "headers": POST}
    for _ in range(BURST):
        await http.post(f"/console/{path}", **sent)
    with sent_statements(console.database) as statements:
        slowed = await http.post(f"/console/{path}", **sent)
        assert (slowed.status_code, slowed.headers["retry-after"]) == (429, "1") and not statements
        # A page of another site uses up nothing of the networks of those who open it.
        foreign = await http.post(f"/console/{path}", headers={"origin": "https://evil.test"})
        assert foreign.status_code == 403
        now = REFILL_S
        await http.post(f"/console/{path}", **sent)
        assert statements


async def test_signing_in_uses_up_no_form_of_a_network(console: Console, harbor: UUID) -> None:
    for _ in range(BURST + 10):
        signed_in = await (await console.browser()).post("/console/sign-in", data=FORM, headers=POST)
        assert signed_in.status_code == 303


async def test_too_many_failures_are_slowed(console: Console, harbor: UUID) -> None:
    http = await console.browser()
    for _ in range(30):
        response = await http.post(
            "/console/sign-in", data={"email": MARA, "password": "wrong"}, headers=POST
        )
        if response.status_code == 429:
            break
    assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
    assert "too many failed sign-ins" in response.text


async def test_the_links_of_the_demo_of_operators_and_of_resets(console: Console, harbor: UUID) -> None:
    async with unit_of_work(console.database, person_actor("test", None), None, None) as uow:
        demo = await demo_link(uow, harbor)
        operator = await invite_operator(uow)
        reset = await reset_user(uow, MARA)
    http = await console.browser()
    assert (await http.get("/console/sign-in", params={"token": demo})).headers["location"] == "/console"
    used = await (await console.browser()).get("/console/sign-in", params={"token": demo})
    assert used.status_code == 404 and "was used, has expired" in used.text
    ways = {"loraplex user reset EMAIL", "loraplex user create --operator", "loraplex serve --demo"}
    assert ways <= set(Page(used).texts(".note code"))
    http = await console.browser()
    page = Page(await http.get("/operator/console/sign-in", params={"token": operator}))
    assert page.find("h1").text() == "Set up an operator"
    sent = page.form("/operator/console/accept") | {
        "email": "op@example.com",
        "name": "Op",
        "password": "short",
    }
    refused = Page(await http.post("/operator/console/accept", data=sent, headers=POST))
    assert refused.texts(".error") == ["A password has 12 to 256 characters."]
    assert refused.find("#email").attributes["value"] == "op@example.com"
    sent["password"] = PASSWORD
    done = await http.post("/operator/console/accept", data=sent, headers=POST)
    assert done.headers["location"] == "/operator/console" and "loraplex-operator=" in str(done.headers)
    http = await console.browser()
    page = Page(await http.get("/console/sign-in", params={"token": reset}))
    sent = page.form("/console/reset-password") | {"password": "another good password"}
    done = await http.post("/console/reset-password", data=sent, headers=POST)
    assert done.headers["location"] == "/console/sign-in"
    assert "has a new password" in (await http.get("/console/sign-in")).text
    again = await http.post("/console/reset-password", data=sent, headers=POST)
    assert again.status_code == 404 and ways <= set(Page(again).texts("main .sub code"))
    assert (await http.post("/console/sign-in", data=FORM, headers=POST)).status_code == 422


async def test_a_switch_of_the_tenant_takes_a_new_token(console: Console, harbor: UUID) -> None:
    quay = await console.tenant("quay")
    await add_person(console.database, "two@harbor.example", roles={harbor: "viewer", quay: "admin"})
    http = await console.browser()
    await http.post("/console/sign-in", data={**FORM, "email": "two@harbor.example"}, headers=POST)
    token = http.cookies["loraplex"]
    page = Page(await http.get("/console/account"))
    assert page.texts("#tenants button") == ["harbor", "quay"]
    fields = page.form("/console/switch-tenant")
    switched = await http.post(
        "/console/switch-tenant", data={**fields, "tenant_id": str(quay)}, headers=POST
    )
    assert switched.status_code == 303 and http.cookies["loraplex"] != token
    assert Page(await http.get("/console/account")).find(".tenant").text().strip() == "Tenant: quay"
    assert (await (await console.browser({"loraplex": token})).get("/console/account")).status_code == 303
    page = Page(await http.get("/console/account"))
    other = await console.tenant("other")
    foreign = await http.post(
        "/console/switch-tenant",
        data={**page.form("/console/switch-tenant"), "tenant_id": str(other)},
        headers=POST,
    )
    assert foreign.status_code == 404
