"""In a browser: an adapter's files are uploaded in parts, with a pause and a reload, checked, and put into production."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import pytest
from playwright.async_api import Page, Route
from tests.platform.web.adapters.test_pages import add, add_calibration, targets
from tests.platform.web.browser import Browser, Console, SignedIn
from tests.platform.web.console.chromium import accessible, accessible_in_all_looks, watched_page
from tests.platform.web.keys.test_pages import make
from tests.tenants.registry_records import digest

from loraplex.tenants.actors import Actor
from loraplex.tenants.audit_log import AuditRepository
from loraplex.tenants.models import AdapterVersion
from loraplex.tenants.registry.adapters import AdapterRepository
from loraplex.tenants.registry.versions import Findings, VersionStates

CONFIG = b'{"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}'
WEIGHTS = bytes(range(256)) * 40
"""11 parts of 1,000 bytes, as this gateway asks for them."""


@pytest.fixture
async def person(console: Console, signed_in: SignedIn) -> Browser:
    """An admin whose tenant has the adapter `pirate` without versions."""
    browser = await signed_in()
    await add(console, browser.session.tenant_id)
    return browser


@pytest.fixture
async def page(console: Console, person: Browser) -> AsyncIterator[Page]:
    """A page of that person; no error, and no request to another server, may occur on it."""
    async with watched_page(console, person) as page:
        yield page


async def accept(console: Console, tenant_id: UUID) -> AdapterVersion:
    """Accept the uploaded version, as its validation would."""
    checks = [{"name": name, "passed": True, "detail": f"{name} is fine"} for name in ("files", "probe")]
    async with console.database.as_tenant(tenant_id) as session:
        record = await AdapterRepository(session, tenant_id).version("pirate", 1)
        audit = AuditRepository(session, Actor("system", "validation"), tenant_id)
        states = VersionStates(session, tenant_id, audit)
        await states.note(record.id, Findings(digest(7), 8, {"r": 8}), {"checks": checks})
        return await states.move(record.id, "ready")


async def test_an_upload_survives_a_reload_and_goes_into_production(
    console: Console, person: Browser, page: Page, tmp_path: Path
) -> None:
    tenant_id = person.session.tenant_id
    assert tenant_id is not None
    files = {"adapter_config.json": CONFIG, "adapter_model.safetensors": WEIGHTS, "notes.txt": b"x"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    both = [str(tmp_path / name) for name in files if name != "notes.txt"]
    fails = {"left": 1}
    stop = asyncio.Event()

    async def part(route: Route) -> None:
        """The first part of the weights fails once; the fifth waits until the page was reloaded."""
        number = route.request.url.rpartition("/")[2]
        if "safetensors" in route.request.url and number == "1" and fails["left"]:
            fails["left"] -= 1
            return await route.fulfill(status=503, json={"error": {"message": "The server is busy."}})
        if number == "5" and not stop.is_set():
            return await route.abort()
        await route.continue_()

    chosen = asyncio.Event()

    async def late(route: Route) -> None:
        """The page's script arrives after the files were chosen."""
        await chosen.wait()
        await route.continue_()

    await page.route("**/parts/*", part)
    await page.route("**/upload/sha256*", late)
    await page.goto("/console/adapters/pirate/upload", wait_until="commit")
    await page.set_input_files("#files", [*both, str(tmp_path / "notes.txt")])
    chosen.set()
    await page.get_by_text("notes.txt is none of the two files").wait_for()
    await accessible(page)
    await page.set_input_files("#files", both)
    await page.get_by_role("button", name="Try again").wait_for()
    await page.get_by_text("Part 5:").first.wait_for()
    stop.set()
    await page.reload()
    await page.get_by_text("Begun uploads").wait_for()
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url) if "/parts/" in request.url else None)
    await page.set_input_files("#files", both)
    await page.get_by_role("heading", name="Validation of v1").wait_for()
    # Only what was missing is sent: the config and most parts were stored before the reload.
    assert sent and all("safetensors" in url for url in sent) and len(sent) < len(WEIGHTS) // 1000
    await accept(console, tenant_id)
    await page.get_by_role("link", name="Move production here").click()
    await (
        page.get_by_role("button", name="Move alias")
        .or_(page.get_by_role("button", name="Create alias"))
        .click()
    )
    await page.get_by_text("pirate:production leads to v1 for every request.").wait_for()
    await accessible(page)
    assert await targets(console, person) == {1: 100}


SHOWN = (
    *("/console/keys", "/console/keys/new", "/console/keys/{key}", "/console/keys/{key}/edit"),
    *("/console/keys/{key}/rotate", "/console/adapters", "/console/adapters/new", "/console/adapters/pirate"),
    "/console/adapters/pirate?version=2",
    *("/console/adapters/pirate/aliases/production/move", "/console/adapters/pirate/delete"),
)


async def test_pages_are_accessible_and_fit_narrow_and_wide(
    console: Console, person: Browser, page: Page
) -> None:
    await add(console, person.session.tenant_id, "ready", "ready", "rejected", production={1: 90, 2: 10})
    await add_calibration(console, person.session.tenant_id, 2)
    key = await make(console, person)
    for path in SHOWN:
        await page.goto(path.format(key=key))
        await accessible_in_all_looks(page)
