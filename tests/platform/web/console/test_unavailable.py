"""While PostgreSQL is away, both areas and the sign-in answer 503, and say what does not answer and when to try again."""

from dataclasses import replace

import httpx
import pytest
from tests.platform.auth.authentication import NOWHERE
from tests.platform.web.browser import ORIGIN, Console, Page

from loraplex.platform.web.app import create_app
from loraplex.platform.web.console.cookies import SESSION_COOKIE
from loraplex.platform.web.console_app import ConsoleOptions, add_console
from loraplex.tenants.database import Database

COOKIES = dict.fromkeys(SESSION_COOKIE.values(), "a-session")


@pytest.fixture
async def away(console: Console) -> Console:
    """The console of a gateway whose PostgreSQL is stopped."""
    database = Database(NOWHERE)
    console.stack.push_async_callback(database.close)
    console.dependencies = replace(console.dependencies, database=database)
    console.app = create_app(console.dependencies)
    add_console(console.app, console.dependencies, ConsoleOptions())
    return console


def stopped(response: httpx.Response) -> Page:
    """The page of a response that must name the store, the time to wait and the request."""
    assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
    page = Page(response)
    assert "PostgreSQL does not answer" in response.text
    assert response.headers["x-request-id"] in response.text
    return page


async def test_every_area_says_that_postgresql_is_away(away: Console) -> None:
    http = await away.browser(COOKIES)
    for path in ("/console", "/console/keys?state=working", "/operator/console", "/console/nowhere"):
        page = stopped(await http.get(path))
        countdown = page.find("[data-retry]")
        assert countdown.attributes["data-retry"] == page.response.headers["retry-after"]
        assert "hidden" in countdown.attributes and page.texts("[data-retry] button") == ["Stop"]
        assert page.find("a.btn.primary").attributes["href"] == path


async def test_a_sign_in_is_not_repeated_by_itself(away: Console) -> None:
    http = await away.browser()
    for area in ("/console", "/operator/console"):
        assert (await http.get(f"{area}/sign-in")).status_code == 200
        pair = {"email": "mara@example.com", "password": "a long password"}
        page = stopped(await http.post(f"{area}/sign-in", data=pair, headers={"origin": ORIGIN}))
        assert page.all("[data-retry]") == [] and "was not carried out" in page.text
        assert "a long password" not in page.response.text


async def test_a_part_of_a_page_says_it_in_its_place(away: Console) -> None:
    http = await away.browser(COOKIES)
    response = await http.get("/operator/console/engine", headers={"hx-request": "true"})
    assert response.status_code == 503 and "<html" not in response.text
    assert "PostgreSQL does not answer; try again in" in response.text
