"""When Chromium paints a page of the console that it has never seen: the first paint, and the largest one.

Invariant: each load has a browser profile of its own, so nothing is cached; the server shares its cores with the browser.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

import uvicorn
from fastapi import FastAPI
from playwright.async_api import Browser, async_playwright

from loraplex.platform.observability.request_id import RequestIds
from loraplex.platform.observability.request_record import ObservedRequests

CHROMIUM: Final = Path("/usr/bin/chromium")
PAINT_COLUMNS: Final = ("first_paint_ms", "largest_paint_ms")
LOADS: Final = 3
# The largest paint is known once nothing else is painted; an observer is given those that were before it.
_PAINTS: Final = """
() => new Promise(resolve => new PerformanceObserver(list => resolve([
    performance.getEntriesByName('first-paint')[0].startTime, list.getEntries().at(-1).startTime
])).observe({type: 'largest-contentful-paint', buffered: true}))
"""


async def measure_paint(app: FastAPI, pages: Mapping[str, tuple[str, str]]) -> dict[str, dict[str, float]]:
    """The times in ms of `PAINT_COLUMNS` of each page, the median of `LOADS`. `pages`: path -> name and token of its session."""
    async with _serving(app) as root, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        found = {path: await _paints(browser, root, path, cookie) for path, cookie in pages.items()}
        await browser.close()
    return found


async def _paints(browser: Browser, root: str, path: str, cookie: tuple[str, str]) -> dict[str, float]:
    loads = [await _load(browser, root, path, cookie) for _ in range(LOADS)]
    return {name: median(times) for name, times in zip(PAINT_COLUMNS, zip(*loads, strict=True), strict=True)}


async def _load(browser: Browser, root: str, path: str, cookie: tuple[str, str]) -> tuple[float, float]:
    context = await browser.new_context(viewport={"width": 1280, "height": 800})
    name, token = cookie
    await context.add_cookies([{"name": name, "value": token, "url": root}])
    page = await context.new_page()
    await page.goto(root + path, wait_until="networkidle")
    first, largest = await page.evaluate(_PAINTS)
    await context.close()
    return float(first), float(largest)


@asynccontextmanager
async def _serving(app: FastAPI) -> AsyncIterator[str]:
    """Serve the app on a free port."""
    served: Any = RequestIds(ObservedRequests(app))
    config = uvicorn.Config(served, port=0, log_level="error", lifespan="off", access_log=False, ws="none")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await serving
