"""Signing in by an identity provider: linked by an invitation alone, and only in the browser that began."""

from dataclasses import replace

import httpx
import pytest
from sqlalchemy import text
from tests.platform.auth.small_provider import SmallProvider
from tests.platform.web.account.oidc_browser import Way, accept, begin, small_provider
from tests.platform.web.browser import ORIGIN, Browser, Console, Page
from tests.tenants.people.people_world import PASSWORD, acting, add_person

from loraplex.platform.auth.failure_buckets import BURST, REFILL_S, FailureBuckets
from loraplex.platform.auth.mail import MailServer
from loraplex.platform.auth.mailed_links import MailedLinks
from loraplex.tenants.actors import system_actor
from loraplex.tenants.errors import ResetForbidden
from loraplex.tenants.people import accounts, team
from loraplex.tenants.unit_of_work import unit_of_work

MARA = "mara@example.com"
START = "/console/oidc/start"


@pytest.fixture
def provider(console: Console) -> SmallProvider:
    return small_provider(console)


@pytest.fixture
async def admin(console: Console) -> Browser:
    return await console.signed_in("admin")


async def invitation(console: Console, admin: Browser, email: str = MARA) -> str:
    """Return the token of an invitation to the admin's tenant."""
    tenant_id = admin.session.tenant_id
    assert tenant_id is not None
    async with acting(console.database, admin.session) as uow:
        return (await team.invite(uow, tenant_id, email, "developer")).token


def refused(response: httpx.Response, words: str) -> bool:
    return response.status_code == 403 and words in response.text and "set-cookie" in response.headers


async def test_an_invitation_links_and_the_identity_signs_in_from_then_on(
    console: Console, provider: SmallProvider, admin: Browser
) -> None:
    token = await invitation(console, admin)
    http = await console.browser()
    shown = await http.get("/console/sign-in", params={"token": token})
    assert (
        "Go on with Acme SSO" in shown.text
        and "Sign in with Acme SSO" in (await http.get("/console/sign-in")).text
    )
    joined = await (await begin(console, provider, token=token)).join()
    assert (joined.status_code, joined.headers["location"]) == (303, "/console")
    again = await begin(console, provider, next="/console/account")
    entered = await again.back()
    assert entered.headers["location"] == "/console/account"
    page = await again.http.get("/console/account")
    assert page.status_code == 200 and MARA in page.text
    async with console.database.as_operator() as session:
        rows = await session.execute(
            text("SELECT email, oidc_issuer FROM users WHERE email = :e"), {"e": MARA}
        )
        assert rows.all() == [(MARA, "https://id.example.com")]


async def test_coming_back_alone_accepts_nothing(
    console: Console, provider: SmallProvider, admin: Browser
) -> None:
    way = await begin(console, provider, token=await invitation(console, admin))
    asked = await way.back()
    shown = Page(asked)
    assert shown.find("h1").text() == "Join harbor?" and MARA in shown.text and "developer" in shown.text
    assert "loraplex=" not in asked.headers["set-cookie"]
    async with console.database.as_operator() as session:
        query = text("SELECT count(*) FROM users WHERE email = :e")
        assert await session.scalar(query, {"e": MARA}) == 0
    path = "/console/oidc/accept"
    assert (await way.http.get(path)).status_code == 404
    # Another site cannot send the form, nor can a browser that did not come back, nor is an attempt an acceptance.
    foreign = await way.http.post(path, data={}, headers={"origin": "https://evil.example.com"})
    assert foreign.status_code == 403
    elsewhere = await console.browser()
    assert refused(
        await elsewhere.post(path, data={}, headers={"origin": ORIGIN}), "was not begun in this browser"
    )
    begun = await begin(console, provider, token=await invitation(console, admin))
    assert refused(
        await begun.http.post(path, data={}, headers={"origin": ORIGIN}), "was not begun in this browser"
    )
    assert refused(await accept(way.http, asked), "was used, has expired")


async def test_the_form_accepts_the_invitation_that_it_shows(
    console: Console, provider: SmallProvider, admin: Browser
) -> None:
    way = await begin(console, provider, token=await invitation(console, admin))
    shown = await way.back()
    # Another page sends the same browser to the provider, with an invitation of its own.
    rival = await invitation(console, await console.signed_in("admin", "rival"))
    begun = await way.http.get("/console/oidc/start", params={"token": rival})
    await Way(way.http, provider.authorize(begun.headers["location"])).back()
    assert refused(await accept(way.http, shown), "was not begun in this browser")
    async with console.database.as_operator() as session:
        assert not (await session.scalars(text("SELECT 1 FROM users WHERE email = :e"), {"e": MARA})).all()


async def test_an_equal_address_alone_links_nothing(
    console: Console, provider: SmallProvider, admin: Browser
) -> None:
    await add_person(console.database, MARA, roles={await console.tenant("harbor"): "admin"})
    response = await (await begin(console, provider)).back()
    assert refused(response, "No account is linked")
    async with console.database.as_writer() as session:
        assert await session.scalar(text("SELECT count(*) FROM users WHERE oidc_subject IS NOT NULL")) == 0


async def test_an_account_that_another_made_for_the_address_is_the_owners_alone(
    console: Console, provider: SmallProvider, admin: Browser
) -> None:
    await add_person(console.database, MARA, roles={await console.tenant("rival"): "admin"})
    pair, headers = {"email": MARA, "password": PASSWORD}, {"origin": ORIGIN}
    intruder = await console.browser()
    assert (await intruder.post("/console/sign-in", data=pair, headers=headers)).status_code == 303
    joined = await (await begin(console, provider, token=await invitation(console, admin))).join()
    assert joined.headers["location"] == "/console"
    assert (await intruder.get("/console/account")).status_code == 303
    assert (await intruder.post("/console/sign-in", data=pair, headers=headers)).status_code == 422


async def test_an_attempt_that_is_no_text_of_this_server_is_refused(
    console: Console, provider: SmallProvider
) -> None:
    http = await console.browser()
    response = await http.get("/console/oidc/callback", headers={b"cookie": b"loraplex-oidc=\xe9"})
    assert refused(response, "was not begun in this browser")


async def test_an_invitation_to_another_address_is_not_accepted(
    console: Console, provider: SmallProvider, admin: Browser
) -> None:
    token = await invitation(console, admin, "eve@example.com")
    assert refused(await (await begin(console, provider, token=token)).back(), "This invitation is for")
    shown = await (await console.browser()).get("/console/sign-in", params={"token": token})
    assert "Go on with Acme SSO" in shown.text


async def test_an_account_has_one_identity(console: Console, provider: SmallProvider, admin: Browser) -> None:
    await (await begin(console, provider, token=await invitation(console, admin))).join()
    other = await console.signed_in("admin", "other")
    provider.claims = {"sub": "subject-2"}
    token = await invitation(console, other)
    assert refused(await (await begin(console, provider, token=token)).join(), "linked to another identity")


async def test_an_admin_sets_no_password_of_an_account_with_an_identity(
    console: Console, provider: SmallProvider, admin: Browser
) -> None:
    await (await begin(console, provider, token=await invitation(console, admin))).join()
    tenant_id = admin.session.tenant_id
    assert tenant_id is not None
    async with console.database.as_operator() as session:
        mara = await session.scalar(text("SELECT id FROM users WHERE email = :e"), {"e": MARA})
    # Its owner would not notice, and the password would open what the account leads to later.
    with pytest.raises(ResetForbidden, match="identity provider"):
        async with acting(console.database, admin.session) as uow:
            await team.reset_member(uow, tenant_id, mara)


async def test_only_the_browser_that_began_may_come_back(
    console: Console, provider: SmallProvider, admin: Browser
) -> None:
    await (await begin(console, provider, token=await invitation(console, admin))).join()
    attempt = await begin(console, provider)
    another = await console.browser()
    assert refused(await attempt.back(another), "was not begun in this browser")
    other = await begin(console, provider)
    assert refused(await attempt.back(other.http), "was not begun in this browser")
    assert not any("loraplex=" in cookie for cookie in another.cookies)


async def test_an_attempt_is_used_once(console: Console, provider: SmallProvider, admin: Browser) -> None:
    await (await begin(console, provider, token=await invitation(console, admin))).join()
    attempt = await begin(console, provider)
    assert (await attempt.back()).status_code == 303
    assert refused(await attempt.back(), "was not begun in this browser")


async def test_no_other_site_is_opened(console: Console, provider: SmallProvider, admin: Browser) -> None:
    await (await begin(console, provider, token=await invitation(console, admin))).join()
    for page in ("https://evil.example.com", "//evil.example.com", "/console/../x", "/operator/console"):
        entered = await (await begin(console, provider, next=page)).back()
        assert entered.headers["location"].startswith("/console"), page


async def test_an_operator_comes_in_by_an_invitation(console: Console, provider: SmallProvider) -> None:
    async with unit_of_work(console.database, system_actor("test"), None, None) as uow:
        token = await accounts.invite_operator(uow)
    joined = await (await begin(console, provider, token=token)).join()
    assert joined.headers["location"] == "/operator/console"
    again = await (await begin(console, provider, area="operator")).back()
    assert again.headers["location"] == "/operator/console"


async def test_a_disabled_account_stays_out(
    console: Console, provider: SmallProvider, admin: Browser
) -> None:
    await (await begin(console, provider, token=await invitation(console, admin))).join()
    async with console.database.as_operator() as session:
        await session.execute(text("UPDATE users SET disabled_at = now() WHERE email = :e"), {"e": MARA})
    assert refused(await (await begin(console, provider)).back(), "disabled")


async def test_a_provider_that_does_not_answer_leaves_the_form(
    console: Console, provider: SmallProvider
) -> None:
    provider.statuses = {"/.well-known/openid-configuration": 503}
    response = await (await console.browser()).get("/console/oidc/start")
    assert response.status_code == 403 and "does not answer" in response.text and "Password" in response.text


async def test_a_network_that_began_sixty_sign_ins_waits(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(FailureBuckets.__init__, "__defaults__", (lambda: now,))
    provider = small_provider(console)
    http, refusable = await console.browser(), await begin(console, provider)
    way = await begin(console, provider)
    for _ in range(BURST - 3):
        assert (await http.get(START)).status_code == 303
    # Without an attempt of this browser nothing is asked of the provider, so nothing is counted.
    assert refused(await (await console.browser()).get("/console/oidc/callback"), "was not begun")
    provider.statuses = {"/token": 400}
    assert refused(await refusable.back(), "does not answer")
    for slowed in (await http.get(START), await way.back()):
        assert (slowed.status_code, slowed.headers["retry-after"]) == (429, "1")
        assert "Password" in slowed.text
    # The provider's answer is still good when the network has waited.
    provider.statuses, now = {}, REFILL_S
    assert refused(await way.back(), "No account is linked")


async def test_sign_ins_that_succeed_use_up_nothing(
    console: Console, provider: SmallProvider, admin: Browser
) -> None:
    await (await begin(console, provider, token=await invitation(console, admin))).join()
    for _ in range(BURST):
        assert (await (await begin(console, provider)).back()).status_code == 303
    assert (await (await console.browser()).get(START)).status_code == 303


async def test_a_refusal_is_a_page_where_links_are_mailed_too(console: Console) -> None:
    server = MailServer.parse("smtp://127.0.0.1:9", "no-reply@example.com")
    console.dependencies = replace(
        console.dependencies, mailed_links=MailedLinks(console.database, server, ORIGIN)
    )
    small_provider(console)
    response = await (await console.browser()).get("/console/oidc/callback")
    assert refused(response, "was not begun") and "Forgot the password?" in response.text


async def test_without_a_provider_there_are_no_such_pages(console: Console) -> None:
    http = await console.browser()
    for path in ("/console/oidc/start", "/console/oidc/callback"):
        assert (await http.get(path)).status_code == 404
    assert "oidc" not in (await http.get("/console/sign-in")).text
