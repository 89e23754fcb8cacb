"""The upload page: who may open it, what it gives its script, and uploads that were begun."""

import json

from tests.platform.web.adapters.test_pages import add
from tests.platform.web.browser import Browser, Console, SignedIn
from tests.platform.web.upload_server import declared

from loraplex.adapters.uploads import use_cases as uploads
from loraplex.tenants.registry.uploads import DeclaredFile
from loraplex.tenants.unit_of_work import unit_of_work

PAGE = "/console/adapters/pirate/upload"
FILES = declared({"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"})


async def begin(console: Console, browser: Browser) -> str:
    """An upload of the pirate's files, without parts."""
    assert browser.session.tenant_id is not None
    tenant_id, service = browser.session.tenant_id, console.dependencies.uploads
    actor = browser.session.actor(None, None)
    async with unit_of_work(console.database, actor, tenant_id, None) as uow:
        files = [DeclaredFile(**each) for each in FILES]
        return str((await uploads.open_upload(uow, service, tenant_id, "pirate", files)).id)


async def test_the_upload_page_needs_adapters_write(console: Console, signed_in: SignedIn) -> None:
    admin = await signed_in()
    await add(console, admin.session.tenant_id)
    for role, status in (("admin", 200), ("developer", 200), ("viewer", 403), ("billing", 403)):
        assert (await (await signed_in(role)).get(PAGE)).status_code == status
    assert (await (await signed_in(tenant="other")).get(PAGE)).status_code == 404
    assert (await admin.get("/console/adapters/nonesuch/upload")).status_code == 404


async def test_the_page_gives_its_script_what_it_needs(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in()
    await add(console, browser.session.tenant_id)
    page = await browser.page(PAGE)
    given = page.find("#uploader").attributes
    assert (given["data-adapter"], given["data-api"], given["data-token"]) == (
        *("pirate", "http://console.test/tenant/v1"),
        "/console/token",
    )
    assert json.loads(given["data-limits"] or "")["adapter_config.json"] == 256 << 10
    assert given["data-csrf"] and int(given["data-free"] or "0") > 0
    scripts = [str(node.attributes["src"]) for node in page.all("script[src]")]
    assert any("upload" in script for script in scripts)
    for script in scripts:
        assert (await browser.get(script)).status_code == 200
    assert "loraplex adapter push DIR" in page.text and not page.all("#begun")


async def test_an_upload_that_was_begun_is_listed(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in()
    await add(console, browser.session.tenant_id)
    upload = await begin(console, browser)
    page = await browser.page(PAGE)
    item = page.find("#begun li")
    assert item.attributes["data-upload"] == upload
    assert json.loads(item.attributes["data-files"] or "") == [
        [each["name"], each["size"], each["sha256"]] for each in FILES
    ]
    assert "0 B of 9 B" in page.text.replace("\xa0", " ")
