"""Webhooks: a secret shown once, forms that keep what was typed, deliveries with their messages, roles and tenants."""

from uuid import UUID

from sqlalchemy import text
from tests.platform.web.browser import Browser, Console, Page, SignedIn
from tests.tenants.webhooks.webhooks import add_event, add_webhook, dispatched, end

from loraplex.tenants.audit_queries import audit_entries

WEBHOOKS = "/console/webhooks"
NEW = f"{WEBHOOKS}/new"
URL = "https://example.com/hooks"
HOSTILE = 'https://example.com/"><script>alert(1)</script>'


async def created(browser: Browser, url: str = URL) -> tuple[str, str]:
    """The address of a new webhook and its secret."""
    response = await browser.submit(NEW, NEW, {"url": url, "events": ["adapter.ready", "invoice.finalized"]})
    assert response.status_code == 200 and response.headers["cache-control"] == "no-store"
    page = Page(response)
    return str(page.find("main form").attributes["action"]), page.find("#secret").text()


async def test_the_life_of_a_webhook(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in("admin")
    assert "No webhooks yet" in (await browser.page(WEBHOOKS)).text
    wrong = await browser.submit(NEW, NEW, {"url": "http://10.0.0.1/", "events": ["adapter.ready"]})
    page = Page(wrong)
    assert wrong.status_code == 422 and page.find("#url").attributes["value"] == "http://10.0.0.1/"
    assert page.find("#url").attributes["aria-invalid"] == "true" and page.texts("#url-e")
    none = await browser.submit(NEW, NEW, {"url": URL})
    assert none.status_code == 422 and "Choose at least one." in none.text

    # One form is one webhook and one secret, however often it is sent.
    form = (await browser.page(NEW)).form(NEW) | {"url": URL, "events": "adapter.ready"}
    first, second = [Page(await browser.post(NEW, form)) for _ in range(2)]
    secret = first.find("#secret").text()
    assert secret.startswith("whsec_") and second.find("#secret").text() == secret
    [address] = [str(node.attributes["href"]) for node in (await browser.page(WEBHOOKS)).all("tbody th a")]
    shown = (await browser.page(address)).response.text + (await browser.page(WEBHOOKS)).response.text
    assert secret not in shown and URL in shown

    changed: dict[str, str | list[str]] = {"url": f"{URL}/2", "events": ["adapter.rejected"]}
    stale = (await browser.page(f"{address}/edit")).form(f"{address}/edit") | {"url": f"{URL}/3"}
    saved = await browser.submit(f"{address}/edit", f"{address}/edit", changed)
    assert saved.status_code == 303 and saved.headers["location"] == address
    assert f"{URL}/2" in (await browser.page(address)).text
    moved = await browser.post(f"{address}/edit", stale | {"events": "adapter.ready"})
    assert moved.status_code == 422 and "changed" in moved.text and f"{URL}/3" in moved.text

    rotated = Page(await browser.submit(f"{address}/rotate", f"{address}/rotate", {"grace": "3600"}))
    assert rotated.find("#secret").text() not in (secret, "")
    assert "signed with the replaced secret" in (await browser.page(address)).text
    dialog = await browser.get(f"{address}/delete", **{"hx-request": "true"})
    assert "<html" not in dialog.text and "<dialog" in dialog.text
    assert (await browser.submit(f"{address}/delete", f"{address}/delete")).status_code == 303
    assert (await browser.get(address)).status_code == 404


async def test_deliveries_are_shown_and_sent_again(console: Console, signed_in: SignedIn) -> None:
    admin, reader = await signed_in("admin"), await signed_in("billing")
    tenant_id = admin.session.tenant_id
    assert tenant_id is not None
    endpoint_id = await add_webhook(console.database, tenant_id)
    ids = []
    for _ in range(51):
        await add_event(console.database, tenant_id)
        ids.append(await dispatched(console.database, endpoint_id))
    await end(console.database, ids[0], "dead")
    await end(console.database, ids[1], "delivered")
    async with console.database.as_operator() as session:
        await session.execute(
            text("UPDATE webhook_deliveries SET last_status = 500, last_error = :error WHERE id = :id"),
            {"error": "<b>busy</b>", "id": ids[0]},
        )
    address = f"{WEBHOOKS}/{endpoint_id}"

    page = await reader.page(address)
    assert len(page.all("tbody tr")) == 50
    older = await reader.page(str(page.find("nav[aria-label=Pages] a").attributes["href"]))
    assert len(older.all("tbody tr")) == 1 and "given up" in older.text
    assert (await reader.get(f"{address}?before=somewhere")).status_code == 400
    listed = await reader.page(WEBHOOKS)
    dead = await reader.page(str(listed.find("td a[href$='state=dead']").attributes["href"]))
    assert len(dead.all("tbody tr")) == 1 and "500 <b>busy</b>" in dead.text and not dead.all("td b")
    assert not dead.all("form[action$='/replay']")

    one = f"{address}/deliveries/{ids[0]}"
    delivery = await reader.page(one)
    assert delivery.texts("button[aria-disabled=true]") == ["Discard", "Send again"]
    assert '"type": "invoice.finalized"' in delivery.text and "Needs the scope tenant:admin" in delivery.text
    sent = await admin.submit(one, f"{one}/replay")
    assert sent.status_code == 303 and sent.headers["location"] == address
    assert "waiting" in (await admin.page(one)).text
    fields = (await admin.page(NEW)).form(NEW)
    refused = await admin.post(f"{one}/replay", {"csrf": fields["csrf"]})
    assert refused.status_code == 422 and "has not ended" in refused.text
    for foreign in (f"{address}/deliveries/nonesuch", f"{address}/deliveries/{UUID(int=0)}"):
        assert (await admin.get(foreign)).status_code == 404


async def test_only_admins_change_and_only_the_own_tenant_sees(console: Console, signed_in: SignedIn) -> None:
    admin, outsider = await signed_in("admin"), await signed_in("admin", tenant="other")
    address, _ = await created(admin)
    for role, status in (("billing", 200), ("developer", 403), ("viewer", 403)):
        browser = await signed_in(role)
        assert [(await browser.get(path)).status_code for path in (WEBHOOKS, address)] == [status] * 2
        csrf = (await browser.page("/console/account")).form("/console/sign-out")["csrf"]
        for path in ("new", f"{address}/edit", f"{address}/rotate", f"{address}/delete"):
            target = path if path.startswith("/") else NEW
            assert (await browser.get(target)).status_code == 403
            assert (await browser.post(target, {"csrf": csrf, "url": URL, "events": "x"})).status_code == 403
    assert "aria-disabled" in (await (await signed_in("billing")).page(WEBHOOKS)).response.text
    assert "No webhooks yet" in (await outsider.page(WEBHOOKS)).text
    csrf = (await outsider.page(NEW)).form(NEW)["csrf"]
    assert (await outsider.get(address)).status_code == 404
    for action in ("edit", "rotate", "delete"):
        assert (await outsider.get(f"{address}/{action}")).status_code == 404
        fields = {"csrf": csrf, "url": URL, "events": "adapter.ready", "grace": "0"}
        assert (await outsider.post(f"{address}/{action}", fields)).status_code == 404
    assert (await admin.post(f"{address}/delete", {})).status_code == 403
    hostile = Page(await admin.submit(NEW, NEW, {"url": HOSTILE, "events": ["adapter.ready"]}))
    assert "<script>alert" not in hostile.response.text


async def test_an_ended_delivery_is_discarded(console: Console, signed_in: SignedIn) -> None:
    admin, outsider = await signed_in("admin"), await signed_in("admin", tenant="other")
    tenant_id = admin.session.tenant_id
    assert tenant_id is not None
    endpoint_id = await add_webhook(console.database, tenant_id)
    await add_event(console.database, tenant_id)
    delivery = await dispatched(console.database, endpoint_id)
    one = f"{WEBHOOKS}/{endpoint_id}/deliveries/{delivery}"
    csrf = (await admin.page(NEW)).form(NEW)["csrf"]
    waiting = await admin.post(f"{one}/discard", {"csrf": csrf})
    assert waiting.status_code == 422 and "has not ended" in waiting.text
    async with console.database.as_tenant(tenant_id) as session:
        await session.execute(text("DELETE FROM webhook_deliveries"))
    assert "waiting" in (await admin.page(one)).text
    await end(console.database, delivery, "dead")
    foreign = (await outsider.page(NEW)).form(NEW)["csrf"]
    assert (await outsider.post(f"{one}/discard", {"csrf": foreign})).status_code == 404
    fields = (await admin.page(one)).form(f"{one}/discard")
    for _ in range(2):
        assert (await admin.post(f"{one}/discard", fields)).status_code == 303
    assert (await admin.get(one)).status_code == 404
    async with console.database.as_operator() as session:
        entries = await audit_entries(session, tenant_id, {"action": "webhook.discard"}, None, 10)
        assert [entry.target for entry in entries] == [one.removeprefix("/console/")]
