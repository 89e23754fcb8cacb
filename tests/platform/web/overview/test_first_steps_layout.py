"""The first steps in a browser, wide and narrow: no sentence is squeezed into a column of letters, whichever step is done."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Final

import pytest
from playwright.async_api import Page
from sqlalchemy import insert
from tests.platform.web.adapters.test_pages import add
from tests.platform.web.browser import Browser, Console, SignedIn
from tests.platform.web.console.chromium import SETTLE, accessible_in_all_looks, watched_page
from tests.tenants.ledger.stored_usage import Used, make_tenant, settle

from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.models import Quota

WIDTHS: Final = (1280, 768, 360)
SQUEEZED: Final = """() => {
    const texts = document.createTreeWalker(document.querySelector("#main"), NodeFilter.SHOW_TEXT), found = [];
    while (texts.nextNode()) {
        const text = texts.currentNode.data.trim(), range = document.createRange();
        range.selectNodeContents(texts.currentNode);
        const { width, height } = range.getBoundingClientRect();
        if (text.length > 20 && width < 90 && height > 120) found.push(`${width} x ${height}: ${text}`);
    }
    return found;
}"""
"""Texts of more than 20 characters in a box that is narrower than 90 px and taller than 120."""


@pytest.fixture
async def person(signed_in: SignedIn) -> Browser:
    """An admin of a tenant that has nothing yet."""
    return await signed_in("admin")


@pytest.fixture
async def page(console: Console, person: Browser) -> AsyncIterator[Page]:
    async with watched_page(console, person) as page:
        yield page


async def check(page: Page, current: str) -> None:
    """The steps stand with this one as the current one, and every text has room at each width."""
    await page.goto("/console")
    assert await page.locator("#first-steps [aria-current] h3").inner_text() == current
    for width in WIDTHS:
        await page.set_viewport_size({"width": width, "height": 900})
        await page.evaluate(SETTLE)
        assert await page.evaluate(SQUEEZED) == [], (current, width)
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (current, width)


async def test_a_new_tenants_steps_have_room(page: Page) -> None:
    await check(page, "Create a key")
    await accessible_in_all_looks(page)
    for after in ("Upload an adapter", "Send the first request", "Set a budget"):
        await page.locator("#first-steps [aria-current]").get_by_role("button", name="Skip").click()
        await page.locator("#first-steps [aria-current] h3", has_text=after).wait_for()
        await check(page, after)


async def test_steps_that_are_done_have_room(console: Console, person: Browser, page: Page) -> None:
    tenant_id = person.session.tenant_id
    assert tenant_id is not None
    async with console.database.as_operator() as session:
        await KeyRepository(session).create(tenant_id, "app", ["inference"], created_by=person.session.email)
    await check(page, "Upload an adapter")
    await add(console, tenant_id, "ready")
    await check(page, "Send the first request")
    async with console.database.as_operator() as session:
        await session.execute(insert(Quota).values(tenant_id=tenant_id, budget_per_month=1_000_000))
    await check(page, "Send the first request")


async def test_the_steps_of_who_may_do_none_of_them_have_room(console: Console) -> None:
    async with watched_page(console, await console.signed_in("viewer")) as page:
        await check(page, "Create a key")


async def test_the_steps_beside_the_numbers_of_a_used_tenant_have_room(console: Console) -> None:
    """Its requests went to the base model: those of an adapter end the steps."""
    used, now = make_tenant(console.database.url), datetime.now(UTC)
    settle(console.database.url, used, [Used(None, next(iter(used.keys.values())), now, ttft_ms=60)])
    async with watched_page(console, await console.signed_in("admin", used.name)) as page:
        await check(page, "Create a key")
