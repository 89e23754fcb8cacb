"""The first steps on the overview: done as their things come to be, skipped in one browser, gone when nothing is left."""

from uuid import UUID

from sqlalchemy import insert
from tests.platform.web.browser import Console, Page, SignedIn
from tests.platform.web.observed_tenant import observed_tenant
from tests.platform.web.playground.test_queries import tenant_with_pirate

from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.models import Quota

OVERVIEW, STEPS = "/console", "/console/first-steps"


def states(page: Page) -> tuple[int, list[str]]:
    """How many steps are done, and the title of the current one."""
    return len(page.all("#first-steps li.done")), page.texts("#first-steps li[aria-current] h3")


async def test_steps_are_done_one_by_one(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in("admin")
    tenant_id = browser.session.tenant_id
    assert isinstance(tenant_id, UUID)
    page = await browser.page(OVERVIEW)
    assert states(page) == (0, ["Create a key"])
    assert "base" in page.find("#first-curl").text() and "$KEY" in page.find("#first-curl").text()
    assert page.find("#first-steps").attributes.get("hx-get") is None

    # The text of a key that an operator or the demo made is not known to have been seen by anybody of the tenant.
    async with console.database.as_operator() as session:
        keys = KeyRepository(session)
        for operator in (None, "operator", "command", "system"):
            await keys.create(tenant_id, "first", ["inference"], created_by=operator)
    assert states(await browser.page(OVERVIEW)) == (0, ["Create a key"])

    async with console.database.as_operator() as session:
        await KeyRepository(session).create(
            tenant_id, "<b>app", ["inference"], created_by=browser.session.email
        )
    page = await browser.page(OVERVIEW)
    assert (
        states(page) == (1, ["Upload an adapter"])
        and "<b>app" in page.text
        and not page.all("#first-steps b")
    )

    skipped = await browser.submit(OVERVIEW, STEPS, {"step": "adapter"})
    assert skipped.status_code == 303
    page = await browser.page(OVERVIEW)
    assert states(page) == (1, ["Send the first request"])
    assert page.find("#first-steps").attributes["hx-get"] == OVERVIEW

    async with console.database.as_operator() as session:
        await session.execute(insert(Quota).values(tenant_id=tenant_id, budget_per_month=1_000_000))
    assert states(await browser.page(OVERVIEW)) == (2, ["Send the first request"])

    # What is skipped is so in one browser, and in one tenant.
    other = await signed_in("viewer")
    seen = await other.page(OVERVIEW)
    assert states(seen) == (2, ["Upload an adapter"]) and "adapters:write" in seen.text
    await browser.submit(OVERVIEW, STEPS, {"step": "all"})
    assert not (await browser.page(OVERVIEW)).all("#first-steps")
    assert (await browser.post(STEPS, {"step": "all"})).status_code == 403


async def test_a_ready_adapter_is_in_the_snippet(console: Console, signed_in: SignedIn) -> None:
    await tenant_with_pirate(console.database, "harbor")
    page = await (await signed_in("developer")).page(OVERVIEW)
    assert states(page) == (1, ["Create a key"])
    assert '"model": "pirate"' in page.find("#first-curl").text()
    assert page.find("#first-python").text().startswith("import os")


async def test_an_answer_of_an_adapter_ends_the_steps(console: Console) -> None:
    used = observed_tenant(console.database.url)
    page = await (await console.signed_in("admin", used.tenant.name)).page(OVERVIEW)
    assert not page.all("#first-steps") and page.all(".stats")
