"""Debian's Chromium on a console at the application's level. Any error and any request to another server fails the test."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import ConsoleMessage, Page, Request, async_playwright
from tests.platform.web.browser import Browser, Console
from tests.platform.web.gateway import served

CHROMIUM: Final = Path("/usr/bin/chromium")
WIDTHS: Final = (1280, 360)
ALL_RULES: Final[Mapping[str, Any]] = {"resultTypes": ["violations"]}
RULES_OF_COLORS: Final[Mapping[str, Any]] = {**ALL_RULES, "runOnly": ["color-contrast", "link-in-text-block"]}
SCHEMES: Final[Mapping[Any, Mapping[str, Any]]] = {"light": ALL_RULES, "dark": RULES_OF_COLORS}
"""What axe looks for in each color scheme: dark changes colors only (`static/tokens.css`)."""
SETTLE: Final = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Ends when a page of a new width has been drawn, with its charts."""


def skip_without_chromium() -> None:
    """Skip the test where there is no Chromium, or fail it where there must be one."""
    if not CHROMIUM.exists():
        reason = f"{CHROMIUM} is missing: apt-get install chromium"
        pytest.fail(reason) if os.environ.get("LORAPLEX_REQUIRE_CHROMIUM") else pytest.skip(reason)


@asynccontextmanager
async def watched_page(console: Console, person: Browser) -> AsyncIterator[Page]:
    """An empty page of that person."""
    async with served(console.app) as url, opened(url) as page:
        cookies = [{"name": name, "value": value, "url": url} for name, value in person.http.cookies.items()]
        await page.context.add_cookies(cookies)  # type: ignore[arg-type]
        yield page


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Page]:
    """An empty page of a new browser, for the server at `url`."""
    skip_without_chromium()
    wrong: list[str] = []
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        context = await chromium.new_context(base_url=url, reduced_motion="reduce")
        page = await context.new_page()
        page.set_default_timeout(60_000)

        def note(message: ConsoleMessage) -> None:
            # The browser reports the requests that a test lets fail.
            if message.type == "error" and not message.text.startswith("Failed to load resource"):
                wrong.append(message.text)

        def check(request: Request) -> None:
            if not request.url.startswith((url, "data:")):
                wrong.append(request.url)

        page.on("console", note)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", check)
        yield page
        await chromium.close()
    assert wrong == []


async def accessible(page: Page, rules: Mapping[str, Any] = ALL_RULES) -> None:
    """No finding of axe, whatever its severity."""
    found = (await Axe().run(page, options=dict(rules))).response["violations"]
    assert [(each["id"], [node["target"] for node in each["nodes"]][:3]) for each in found] == [], page.url


async def accessible_in_all_looks(page: Page) -> None:
    """Wide and narrow, in light and dark, nothing is found and nothing is wider than the page."""
    for width in WIDTHS:
        await page.set_viewport_size({"width": width, "height": 800})
        for scheme, rules in SCHEMES.items():
            await page.emulate_media(color_scheme=scheme)
            await page.evaluate(SETTLE)
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
                page.url,
                width,
            )
            await accessible(page, rules)
