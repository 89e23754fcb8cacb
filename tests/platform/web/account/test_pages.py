"""One's own account: password, second factor with recovery codes, theme, sessions; what the navigation counts."""

import httpx
import pyotp
from sqlalchemy import text
from tests.platform.web.browser import ORIGIN, Console, Page, SignedIn
from tests.tenants.people.people_world import PASSWORD
from tests.tenants.registry_records import RegistryWriter

from loraplex.tenants.actors import system_actor
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.people.accounts import DEMO_EMAIL, demo_link
from loraplex.tenants.unit_of_work import unit_of_work

NEW = "a longer new password"


async def second_session(console: Console, email: str) -> str:
    """Sign in again and return the token."""
    http = await console.browser()
    await http.post(
        "/console/sign-in", data={"email": email, "password": PASSWORD}, headers={"origin": ORIGIN}
    )
    return http.cookies["loraplex"]


async def test_a_new_password_renews_this_session_and_ends_the_others(
    console: Console, signed_in: SignedIn
) -> None:
    person = await signed_in("viewer")
    before, other = person.http.cookies["loraplex"], await second_session(console, person.session.email)
    action = "/console/account/password"
    wrong = await person.submit("/console/account", action, {"present": "wrong", "password": NEW})
    assert wrong.status_code == 422 and Page(wrong).texts(".error") == ["Email or password is wrong."]
    short = await person.submit("/console/account", action, {"present": PASSWORD, "password": "short"})
    assert Page(short).texts(".error") == ["A password has 12 to 256 characters."]
    done = await person.submit("/console/account", action, {"present": PASSWORD, "password": NEW})
    assert done.status_code == 303 and person.http.cookies["loraplex"] != before
    assert "The new password is in force." in (await person.page("/console/account")).response.text
    for token in (before, other):
        assert (await (await console.browser({"loraplex": token})).get("/console/account")).status_code == 303


async def test_a_theme_is_of_the_browser_and_needs_no_script(console: Console, signed_in: SignedIn) -> None:
    person = await signed_in("viewer")
    page = await person.page("/console/account")
    assert "data-theme" not in page.find("html").attributes
    assert page.texts(".seg [aria-current]") == ["System"]
    for theme, attribute, scheme in (
        ("dark", "dark", "dark"),
        ("light", "light", "light"),
        ('"><script>', None, "light dark"),
    ):
        chosen = await person.submit("/console/account", "/console/account/theme", {"theme": theme})
        assert chosen.headers["location"] == "/console/account"
        for path in ("/console/account", "/console/nothing-here"):
            page = Page(await person.get(path))
            assert page.find("html").attributes.get("data-theme") == attribute, path
            assert page.find("meta[name=color-scheme]").attributes["content"] == scheme
    assert (await person.post("/console/account/theme", {"theme": "dark"})).status_code == 403
    signed_out = await (await console.browser({"loraplex-theme": "dark"})).get("/console/sign-in")
    assert Page(signed_out).find("html").attributes["data-theme"] == "dark"


async def test_navigation_counts_what_works(console: Console, signed_in: SignedIn) -> None:
    person, other = await signed_in(), await signed_in(tenant="other")
    tenant_id = person.session.tenant_id
    assert tenant_id is not None
    async with console.database.as_tenant(tenant_id) as session:
        for name in ("pirate", "coral"):
            await RegistryWriter(session, tenant_id).get_or_create(name)
        keys = KeyRepository(session)
        made = [await keys.create(tenant_id, name, ["inference"]) for name in ("app", "old")]
        await keys.revoke(tenant_id, made[1].record.key_id)
    assert (await person.page("/console/account")).texts(".side .count") == ["2", "1"]
    assert (await other.page("/console/account")).texts(".side .count") == ["0", "0"]


async def test_sessions_end_one_by_one_and_all(console: Console, signed_in: SignedIn) -> None:
    person = await signed_in("viewer")
    page = await person.page("/console/account")
    assert page.texts("[aria-disabled=true]") == ["Sign out everywhere else"]
    tokens = [await second_session(console, person.session.email) for _ in range(3)]
    page = await person.page("/console/account")
    assert len(page.all("tbody tr")) == 4
    action = next(
        str(form.attributes["action"])
        for form in page.all("tbody form")
        if str(form.attributes["action"]).endswith("/end")
    )
    await person.post(action, page.form(action))
    assert len((await person.page("/console/account")).all("tbody tr")) == 3
    await person.submit("/console/account", "/console/account/sessions/end-all")
    assert len((await person.page("/console/account")).all("tbody tr")) == 1
    for token in tokens:
        assert (await (await console.browser({"loraplex": token})).get("/console/account")).status_code == 303


async def test_a_session_of_another_person_does_not_exist(signed_in: SignedIn) -> None:
    person, other = await signed_in("viewer"), await signed_in("viewer")
    form = (await person.page("/console/account")).form("/console/account/sessions/end-all")
    assert (await person.post(f"/console/account/sessions/{other.session.id}/end", form)).status_code == 404
    assert (await other.get("/console/account")).status_code == 200


async def test_the_second_factor_asks_for_the_password_and_shows_recovery_codes_once(
    console: Console, signed_in: SignedIn
) -> None:
    person, account = await signed_in("viewer"), "/console/account"
    assert "Set up second factor…" in (await person.page(account)).text
    action = f"{account}/second-factor"
    wrong = await person.submit(action, action, {"present": "wrong"})
    assert wrong.status_code == 422 and Page(wrong).texts(".error") == ["Email or password is wrong."]
    scanned = Page(await person.submit(action, action, {"present": PASSWORD}))
    secret, fields = scanned.find("#totp-secret").text(), scanned.form(f"{action}/confirm")
    refused = await person.post(f"{action}/confirm", {**fields, "code": "000000"}, **{"hx-request": "true"})
    assert refused.status_code == 422 and refused.headers["hx-retarget"] == "#main"
    code = pyotp.TOTP(secret).now()
    shown = await person.post(f"{action}/confirm", {**fields, "code": code}, **{"hx-request": "true"})
    codes = Page(shown).find("#recovery-codes").text().split()
    assert len(codes) == 10 and shown.headers["cache-control"] == "no-store"
    assert Page(shown).find("dialog").attributes["closedby"] == "none"
    after = await person.page(account)
    assert codes[0] not in after.response.text and "10 of 10 recovery codes are left" in after.text
    entered = await by_code(console, person.session.email, codes[0])
    assert entered.headers["location"] == "/console" and "loraplex-toast" in entered.headers["set-cookie"]
    assert "9 of 10" in (await person.page(account)).text
    assert (await by_code(console, person.session.email, codes[0])).status_code == 422
    path = f"{account}/recovery-codes"
    assert (await person.submit(path, path, {"present": PASSWORD, "code": codes[0]})).status_code == 422
    remade = await person.submit(path, path, {"present": PASSWORD, "code": codes[1]})
    made = Page(remade).find("#recovery-codes").text().split()
    assert not set(made) & set(codes)
    path = f"{account}/second-factor/remove"
    assert (await person.submit(path, path, {"present": "wrong", "code": made[0]})).status_code == 422
    assert (await person.submit(path, path, {"present": PASSWORD, "code": made[0]})).status_code == 303
    assert "Set up second factor…" in (await person.page(account)).text


async def by_code(console: Console, email: str, code: str) -> httpx.Response:
    """Sign in with the password and this code."""
    http, headers = await console.browser(), {"origin": ORIGIN}
    asked = Page(
        await http.post("/console/sign-in", data={"email": email, "password": PASSWORD}, headers=headers)
    )
    fields = asked.form("/console/sign-in") | {"code": code}
    return await http.post("/console/sign-in", data=fields, headers=headers)


async def test_without_a_password_a_change_takes_a_new_sign_in(console: Console, signed_in: SignedIn) -> None:
    person = await signed_in("viewer")
    async with console.database.as_writer() as session:
        await session.execute(text("UPDATE users SET password_hash = NULL"))
        await session.execute(text("UPDATE sessions SET expires_at = expires_at - interval '6 minutes'"))
    page = await person.page("/console/account")
    assert page.texts("button[aria-disabled=true]") == ["Set password", "Sign out everywhere else"]
    fields = page.form("/console/account/sessions/end-all") | {"password": NEW, "present": PASSWORD}
    for path in ("password", "second-factor", "second-factor/remove", "recovery-codes"):
        refused = await person.post(f"/console/account/{path}", fields)
        assert refused.status_code == 422 and "a sign-in of the last 5 minutes" in refused.text


async def test_who_came_by_a_link_is_offered_a_password_at_once_and_told_the_ways_later(
    console: Console, signed_in: SignedIn
) -> None:
    http = await console.browser()

    async def came_by_link() -> Page:
        tenant_id = await console.tenant("harbor")
        async with unit_of_work(console.database, system_actor("demo"), None, None) as uow:
            token = await demo_link(uow, tenant_id)
        assert (await http.get(f"/console/sign-in?token={token}")).headers["location"] == "/console"
        return Page(await http.get("/console"))

    offered = await came_by_link()
    assert (
        "has no password yet" in offered.text
        and offered.find(".note a").attributes["href"] == "/console/account"
    )
    async with console.database.as_writer() as session:
        await session.execute(text("UPDATE sessions SET expires_at = expires_at - interval '6 minutes'"))
    assert "has no password" not in Page(await http.get("/console")).text
    late = Page(await http.get("/console/account"))
    assert f"loraplex user reset {DEMO_EMAIL}" in late.texts("code") and "It takes a link." in late.text
    # The next link leads to a form that works, and the person then comes back by the password.
    await came_by_link()
    page = Page(await http.get("/console/account"))
    sent = page.form("/console/account/password") | {"password": NEW}
    done = await http.post("/console/account/password", data=sent, headers={"origin": ORIGIN})
    assert done.status_code == 303
    assert "has no password" not in Page(await http.get("/console")).text
    form, headers = {"email": DEMO_EMAIL, "password": NEW}, {"origin": ORIGIN}
    back = await (await console.browser()).post("/console/sign-in", data=form, headers=headers)
    assert back.headers["location"] == "/console"
    # Who has an identity at a provider needs none here.
    person = await signed_in("admin")
    async with console.database.as_writer() as session:
        await session.execute(
            text("UPDATE users SET password_hash = NULL, oidc_issuer = 'i', oidc_subject = email")
        )
    assert "has no password" not in (await person.page("/console")).text


async def test_an_operator_who_looks_into_a_tenant_has_the_account_of_the_operator_area(
    console: Console, signed_in: SignedIn
) -> None:
    tenant_id, operator = await console.tenant("harbor"), await signed_in("operator")
    address = f"/operator/console/tenants/{tenant_id}"
    assert (await operator.submit(address, f"{address}/look")).headers["location"] == "/console"
    for path in ("", "/second-factor", "/second-factor/remove", "/recovery-codes"):
        answer = await operator.get(f"/console/account{path}")
        assert (answer.status_code, answer.headers["location"]) == (303, "/operator/console/account"), path
        assert (await operator.get(f"/operator/console/account{path}")).status_code == 200, path
