"""Links by mail: a forgotten password and a tenant of one's own; a page does not tell which addresses have accounts."""

import re
from dataclasses import dataclass, field, replace

import httpx
import pytest
from sqlalchemy import text
from tests.platform.web.browser import ORIGIN, Console
from tests.tenants.people.people_world import PASSWORD, add_person

from loraplex.platform.auth.mail import MailServer
from loraplex.platform.auth.mailed_links import MailedLinks
from loraplex.platform.errors import MailNotSent
from loraplex.platform.web.app import create_app
from loraplex.platform.web.console_app import ConsoleOptions, add_console
from loraplex.tenants.actors import system_actor
from loraplex.tenants.people import sign_up
from loraplex.tenants.unit_of_work import unit_of_work

MARA, OTHER = "mara@example.com", "another long password"
LINK = re.compile(rf"{ORIGIN}(/console/sign-in\?token=[\w-]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outbox(MailServer):
    """Keeps the messages."""

    sent: list[tuple[str, str, str]] = field(default_factory=list)
    away: list[bool] = field(default_factory=list)

    async def send(self, to: str, subject: str, text: str) -> None:
        if self.away:
            raise MailNotSent("away") from OSError("refused")
        self.sent.append((to, subject, text))


@pytest.fixture
def outbox(console: Console) -> Outbox:
    """The mails of a console with a mail server."""
    server = Outbox(host="", port=0, tls=True, username=None, password=None, sender="loraplex@example.com")
    links = MailedLinks(console.database, server, ORIGIN)
    console.dependencies = replace(console.dependencies, mailed_links=links)
    console.app = create_app(console.dependencies)
    add_console(console.app, console.dependencies, ConsoleOptions())
    return server


async def ask(console: Console, path: str, email: str) -> httpx.Response:
    """Ask for a link, and wait until the mail is sent."""
    http = await console.browser()
    response = await http.post(path, data={"email": email}, headers={"origin": ORIGIN})
    await console.dependencies.background_tasks.join()
    return response


async def send(console: Console, path: str, fields: dict[str, str]) -> httpx.Response:
    return await (await console.browser()).post(path, data=fields, headers={"origin": ORIGIN})


def link_in(outbox: Outbox) -> str:
    """The path of the link in the newest mail."""
    found = LINK.search(outbox.sent[-1][2])
    assert found is not None
    return found[1]


async def test_an_admin_sends_a_reset_link(console: Console, outbox: Outbox) -> None:
    admin, viewer = await console.signed_in("admin"), await console.signed_in("viewer")
    path = f"/console/team/{viewer.session.user_id}"
    page = await admin.page(path)
    assert "Send a reset link" in page.text
    fields = page.form(f"{path}/reset")
    for _ in range(2):
        sent = await admin.post(f"{path}/reset", fields)
        assert sent.headers["location"] == path and "token=" not in sent.text
    assert [each[0] for each in outbox.sent] == [viewer.session.email]
    assert admin.session.email in outbox.sent[0][2]
    link = link_in(outbox)
    assert "Set a new password" in (await (await console.browser()).get(link)).text
    outbox.away.append(True)
    shown = await admin.submit(path, f"{path}/reset")
    assert shown.status_code == 200 and "did not take it" in shown.text and "token=" in shown.text


async def test_a_forgotten_password_is_set_by_the_link_in_a_mail(console: Console, outbox: Outbox) -> None:
    await add_person(console.database, MARA, roles={await console.tenant("harbor"): "viewer"})
    assert "/console/forgot-password" in (await (await console.browser()).get("/console/sign-in")).text
    known, unknown = [
        await ask(console, "/console/forgot-password", each) for each in (MARA, "x@example.com")
    ]
    assert known.status_code == unknown.status_code == 200
    assert known.text.replace(MARA, "x@example.com") == unknown.text
    assert [to for to, _, _ in outbox.sent] == [MARA]
    path = link_in(outbox)
    assert "Set a new password" in (await (await console.browser()).get(path)).text
    fields = {"token": path.partition("token=")[2], "password": OTHER}
    assert (await send(console, "/console/reset-password", fields)).status_code == 303
    for password, status in ((PASSWORD, 422), (OTHER, 303)):
        pair = {"email": MARA, "password": password}
        assert (await send(console, "/console/sign-in", pair)).status_code == status


async def test_the_address_of_a_link_is_not_the_requests(console: Console, outbox: Outbox) -> None:
    await add_person(console.database, MARA, roles={await console.tenant("harbor"): "viewer"})
    http = await console.browser()
    headers = {"origin": "http://evil.example.com", "host": "evil.example.com"}
    response = await http.post("/console/forgot-password", data={"email": MARA}, headers=headers)
    await console.dependencies.background_tasks.join()
    assert response.status_code == 200 and "evil" not in outbox.sent[-1][2] and link_in(outbox)


async def test_a_tenant_is_opened_by_mail_while_a_plan_is_published(console: Console, outbox: Outbox) -> None:
    http = await console.browser()
    assert (await http.get("/console/sign-up")).status_code == 404
    async with console.database.as_operator() as session:
        await session.execute(
            text("INSERT INTO rate_cards (scope, tier, currency) VALUES ('tier', 'free', 'USD')")
        )
    async with unit_of_work(console.database, system_actor("test"), None, None) as uow:
        await sign_up.publish_plan(uow, "free", {"tokens_per_day": 5}, weight=0.5)
    assert "/console/sign-up" in (await http.get("/console/sign-in")).text
    assert "Open a tenant" in (await http.get("/console/sign-up")).text
    assert (await ask(console, "/console/sign-up", MARA)).status_code == 200
    path = link_in(outbox)
    assert "Name of the tenant" in (await http.get(path)).text
    fields = {"token": path.partition("token=")[2], "password": PASSWORD, "name": "Mara"}
    for name in ("Not A Name", "harbor"):
        await console.tenant("harbor")
        refused = await send(console, "/console/accept", {**fields, "tenant_name": name})
        assert refused.status_code in (409, 422), refused.text
    opened = await send(console, "/console/accept", {**fields, "tenant_name": "island"})
    assert (opened.status_code, opened.headers["location"]) == (303, "/console")
    query = """
        SELECT t.name, t.tier, t.weight, q.tokens_per_day, m.role, (SELECT count(*) FROM api_keys)
        FROM tenants t JOIN quotas q ON q.tenant_id = t.id JOIN memberships m ON m.tenant_id = t.id
    """
    async with console.database.as_operator() as session:
        assert (await session.execute(text(query))).all() == [("island", "free", 0.5, 5, "admin", 0)]
    assert (await ask(console, "/console/sign-up", MARA)).status_code == 200
    assert outbox.sent[-1][1] == "You have an account" and not LINK.search(outbox.sent[-1][2])


async def test_a_plan_that_ended_opens_no_tenant(console: Console, outbox: Outbox) -> None:
    async with unit_of_work(console.database, system_actor("test"), None, None) as uow:
        await uow.session.execute(text("INSERT INTO rate_cards (scope, currency) VALUES ('all', 'USD')"))
        await sign_up.publish_plan(uow, "free", {})
    await ask(console, "/console/sign-up", MARA)
    async with unit_of_work(console.database, system_actor("test"), None, None) as uow:
        await sign_up.end_plan(uow)
    assert (await ask(console, "/console/sign-up", "eve@example.com")).status_code == 404
    token = link_in(outbox).partition("token=")[2]
    fields = {"token": token, "password": PASSWORD, "name": "Mara", "tenant_name": "island"}
    assert "Sign-up is closed" in (await send(console, "/console/accept", fields)).text
    async with console.database.as_operator() as session:
        assert await session.scalar(text("SELECT count(*) FROM users")) == 0


async def test_an_invitation_is_mailed_once_and_shown(console: Console, outbox: Outbox) -> None:
    admin = await console.signed_in("admin")
    fields = (await admin.page("/console/team/invite")).form("/console/team/invite")
    fields |= {"email": "new@example.com", "role": "viewer"}
    first = await admin.post("/console/team/invite", fields)
    path = link_in(outbox)
    assert path in first.text and "It is mailed to new@example.com" in first.text
    again = await admin.post("/console/team/invite", fields)
    assert path in again.text and len(outbox.sent) == 1
    assert (outbox.sent[0][0], outbox.sent[0][1]) == ("new@example.com", "Join harbor")


async def test_requests_for_mails_are_slowed(console: Console, outbox: Outbox) -> None:
    await add_person(console.database, MARA, roles={await console.tenant("harbor"): "viewer"})
    statuses = [(await ask(console, "/console/forgot-password", MARA)).status_code for _ in range(11)]
    assert statuses == [200] * 10 + [429] and len(outbox.sent) == 10
    assert (await ask(console, "/console/forgot-password", "nonsense")).status_code == 422
    # Mails that were asked for in a network slow no sign-in there.
    pair = {"email": MARA, "password": PASSWORD}
    assert (await send(console, "/console/sign-in", pair)).status_code == 303


async def test_a_tenant_mails_few_invitations_in_a_row(console: Console, outbox: Outbox) -> None:
    admin = await console.signed_in("admin")
    pages = []
    for number in range(11):
        fields = (await admin.page("/console/team/invite")).form("/console/team/invite")
        fields |= {"email": f"new{number}@example.com", "role": "viewer"}
        pages.append(await admin.post("/console/team/invite", fields))
    assert len(outbox.sent) == 10 and "It is mailed to" in pages[9].text
    assert pages[10].status_code == 200 and "It is mailed to" not in pages[10].text
    assert LINK.search(pages[10].text)


async def test_a_mail_server_that_is_away_is_not_the_visitors_matter(
    console: Console, outbox: Outbox
) -> None:
    await add_person(console.database, MARA, roles={await console.tenant("harbor"): "viewer"})
    outbox.away.append(True)
    assert (await ask(console, "/console/forgot-password", MARA)).status_code == 200


async def test_without_a_mail_server_there_are_no_such_pages(console: Console) -> None:
    http = await console.browser()
    for path in ("/console/forgot-password", "/console/sign-up"):
        assert (await http.get(path)).status_code == 404
    assert "forgot-password" not in (await http.get("/console/sign-in")).text
