"""`/` for browsers and for programs, the slash at the end of an address, HEAD on pages, and the icon."""

from xml.etree import ElementTree

import pytest
from tests.platform.web.browser import Console, Page, SignedIn
from tests.platform.web.console.chromium import accessible_in_all_looks, watched_page
from tests.platform.web.console.test_allowed_hosts import ELSEWHERE, reconfigured, status
from tests.platform.web.console.test_page_roles import OPERATOR, routes_of
from tests.platform.web.route_table import in_process

from loraplex.platform.web.app import create_app
from loraplex.platform.web.console_app import ConsoleOptions
from loraplex.platform.web.transport.docs import PLACES, index_router

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"


@pytest.fixture
def indexed(console: Console) -> Console:
    """The console of a gateway with an index, as `server/gateway.py` builds it."""
    console.app.include_router(index_router(console=True))
    return console


async def test_browsers_get_a_page_and_programs_json(indexed: Console) -> None:
    http = await indexed.browser()
    answered = await http.get("/", headers={"accept": BROWSER})
    links = {str(node.attributes["href"]) for node in Page(answered).all("main a")}
    assert links == {"/console", "/docs", "/livez"}
    assert (
        "accept" in answered.headers["vary"].split(", ") and answered.headers["cache-control"] == "no-store"
    )
    assert "default-src 'none'" in answered.headers["content-security-policy"]
    answered = await http.get("/", headers={"accept": "application/json"})
    assert answered.headers["vary"] == "accept"
    assert answered.json() == {"name": "loraplex", **PLACES, "console": "/console"}


async def test_without_a_console_everybody_gets_json(console: Console) -> None:
    app = create_app(console.dependencies, [index_router(console=False)])
    async with in_process(app) as http:
        answered = await http.get("/", headers={"accept": BROWSER})
        # By it clients of Anthropic look whether there is a server.
        assert (await http.head("/")).status_code == 200
    assert answered.json()["docs"] == "/docs" and "console" not in answered.json()


async def test_an_unknown_name_opens_no_page(console: Console) -> None:
    reconfigured(console, ConsoleOptions(is_local=True))
    console.app.include_router(index_router(console=True))
    for host in ELSEWHERE:
        assert await status(console, "/", [host], accept=BROWSER) == 421, host
        assert await status(console, "/", [host]) == 200, host
    assert await status(console, "/", ["localhost:8000"], accept=BROWSER) == 200


async def test_a_slash_at_the_end_leads_to_the_page(console: Console, signed_in: SignedIn) -> None:
    person = await signed_in("admin")
    for asked, page in (
        ("/console/", "/console"),
        ("/console//?range=7d", "/console?range=7d"),
        ("/operator/console/", "/operator/console"),
        ("/console/keys/", "/console/keys"),
        ("/console/nothing/", "/console/nothing"),
    ):
        answered = await person.get(asked)
        assert (answered.status_code, answered.headers["location"]) == (303, page)
    assert (await person.get("/console/nothing")).status_code == 404
    assert (await person.post("/console/keys/", {})).status_code == 404


async def test_head_on_every_page_is_answered_as_get(console: Console) -> None:
    browsers = [await console.signed_in("admin"), await console.signed_in("operator")]
    for route in routes_of(console.app):
        if route.method == "GET":
            person, path = browsers[route.asks == OPERATOR], route.at({})
            asked, head = await person.get(path), await person.http.head(path)
            assert (head.status_code, head.content) == (asked.status_code, b""), path
            assert head.headers.keys() == asked.headers.keys(), path


async def test_the_index_in_a_browser(indexed: Console, signed_in: SignedIn) -> None:
    async with watched_page(indexed, await signed_in("admin")) as page:
        await page.goto("/")
        await accessible_in_all_looks(page)
        icon = await page.locator("link[rel=icon]").get_attribute("href")
        await page.get_by_role("link", name="Open the console").click()
        assert await page.get_by_role("heading", name="Overview").is_visible()
    answered = await (await indexed.browser()).get(icon or "")
    assert (
        answered.headers["content-type"] == "image/svg+xml" and "max-age" in answered.headers["cache-control"]
    )
    assert ElementTree.fromstring(answered.content).tag == "{http://www.w3.org/2000/svg}svg"
