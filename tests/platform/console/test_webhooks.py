"""Webhooks: who may see and change them, the secret that is shown once, deliveries and their repetition."""

import re
from uuid import UUID, uuid4

from sqlalchemy import update
from tests.platform.console.conftest import Console, Page, SignedIn

from loraplex.tenants.models import OutboxEvent, WebhookDelivery

PATH = "/console/billing/webhooks"
NEW: dict[str, str | list[str]] = {
    "url": "https://hooks.example.com/x?a=1&b=2",
    "events": ["invoice.finalized"],
}


async def delivered(console: Console, tenant_id: UUID, webhook_id: UUID) -> UUID:
    """A delivery that was given up."""
    async with console.database.as_operator() as session:
        event = OutboxEvent(id=uuid4(), tenant_id=tenant_id, type="invoice.finalized", subject="x", data={})
        session.add(event)
        await session.flush()
        delivery = WebhookDelivery(tenant_id=tenant_id, event_id=event.id, endpoint_id=webhook_id)
        delivery.attempts_left, delivery.expires_at = 0, event.created_at
        session.add(delivery)
        await session.flush()
        dead = {"state": "dead", "ended_at": event.created_at, "attempts": 10, "last_error": "<i>refused</i>"}
        await session.execute(update(WebhookDelivery).where(WebhookDelivery.id == delivery.id).values(**dead))
        return delivery.id


async def test_roles(signed_in: SignedIn) -> None:
    for role, reads in (("admin", 200), ("billing", 200), ("developer", 403), ("viewer", 403)):
        browser = await signed_in(role)
        assert (await browser.get(PATH)).status_code == reads, role
        if reads == 200:
            page = await browser.page(PATH)
            assert "No webhooks yet" in page.text
            assert len(page.all(f'form[action="{PATH}"]')) == (1 if role == "admin" else 0)
            assert ("it needs the scope tenant:admin" in page.text) == (role == "billing")
        if role != "admin":
            sent = await browser.post(PATH, {**NEW, "csrf": browser.session.csrf_token})
            assert sent.status_code == 403, role


async def test_from_creation_to_a_repeated_delivery(console: Console, signed_in: SignedIn) -> None:
    admin, billing = await signed_in("admin"), await signed_in("billing")
    form = (await admin.page(PATH)).form(PATH)
    answers = [await admin.post(PATH, {**form, **NEW}) for _ in range(2)]
    secrets = {secret for answer in answers for secret in re.findall(r"whsec_[\w+/=]+", answer.text)}
    assert len(secrets) == 1 and [each.status_code for each in answers] == [200, 200]
    page = await billing.page(PATH)
    assert page.texts("tbody a") == [NEW["url"]]
    address = str(page.find("tbody a").attributes["href"])
    assert secrets.pop() not in (await admin.get(address)).text
    assert admin.session.tenant_id is not None
    delivery = await delivered(console, admin.session.tenant_id, UUID(address.rpartition("/")[2]))
    seen = await billing.page(address)
    assert seen.texts("tbody .chip") == ["dead"] and "<i>refused</i>" in seen.text and not seen.all("main i")
    assert not seen.all("main form[method=post]")
    action = f"{address}/deliveries/{delivery}"
    assert (await admin.submit(address, action)).headers["location"] == address
    assert (await admin.page(f"{address}?state=pending")).texts("tbody .chip") == ["pending"]
    assert (await admin.page(f"{address}?state=dead")).all("tbody .chip") == []
    rotated = await admin.submit(address, f"{address}/rotate")
    assert "whsec_" in rotated.text and "signed with the replaced one too" in rotated.text
    other = await signed_in("admin", "other")
    for path in (address, f"{PATH}/1"):
        assert (await other.get(path)).status_code == 404
    changed = await admin.submit(
        address, f"{address}/change", {"url": "https://new.example.com", "events": ["invoice.finalized"]}
    )
    assert changed.headers["location"] == address
    assert (await admin.submit(address, f"{address}/delete")).headers["location"] == PATH
    assert (await admin.get(address)).status_code == 404


async def test_what_is_wrong_stands_at_its_field(signed_in: SignedIn) -> None:
    admin = await signed_in("admin")
    for wrong, name in (
        ({"url": "http://127.0.0.1/"}, "url"),
        ({"url": ""}, "url"),
        ({"events": []}, "events"),
    ):
        refused = await admin.submit(PATH, PATH, {**NEW, **wrong})
        page = Page(refused)
        assert refused.status_code == 422 and page.find(f"#{name}-e"), wrong
        if name == "events":
            assert page.find("input[name=url]").attributes["value"] == NEW["url"]
