"""The names by which the console answers: what a page of another site reaches under a name of its own that leads here."""

import re
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from playwright.async_api import expect
from tests.platform.web.browser import Console, Page, SignedIn
from tests.platform.web.console.chromium import opened
from tests.platform.web.gateway import served
from tests.tenants.people.people_world import PASSWORD, add_person

from loraplex.platform.web.console_app import ConsoleOptions, add_console

PUBLIC = "https://llm.example.com"
HERE: tuple[str, ...] = (
    "localhost",
    "localhost:8000",
    "LocalHost:80",
    "localhost.",
    "127.0.0.1",
    "127.0.0.1:8000",
    "10.1.2.3",
)
HERE += ("[::1]", "[::1]:8000", "[2001:DB8::1]:443", "127.0.0.1.", "localhost:")
ELSEWHERE: tuple[str, ...] = (
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "evil.localhost",
    "127.0.0.1.evil.example",
)
ELSEWHERE += (
    "::1",
    "[::1",
    "[localhost]x",
    "[]",
    "localhost:80@evil.example",
    "localhost@evil.example",
    "localhost..",
)
ELSEWHERE += (
    "localhost:x",
    "localhost/..",
    "localhost#",
    "127.1",
    "2130706433",
    "0x7f.0.0.1",
    ".",
    ":8000",
    "",
    "*",
)
NAMED = ("llm.example.com", "LLM.Example.COM:443", "llm.example.com:8443", "llm.example.com.")


def reconfigured(console: Console, options: ConsoleOptions) -> Console:
    add_console(console.app, console.dependencies, options)
    return console


async def status(console: Console, path: str, hosts: Sequence[str], accept: str = "*/*") -> int:
    """The status of a request with as many `Host` headers as there are `hosts`."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", host.encode()) for host in hosts] + [(b"accept", accept.encode())]
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
    }
    scope |= {
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
    }
    await console.app({**scope, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000)}, receive, send)
    found: int = sent[0]["status"]
    return found


@pytest.mark.parametrize(
    "path", ["/console/sign-in", "/operator/console/sign-in", "/console/static/console.js"]
)
async def test_a_local_console_answers_by_localhost_and_addresses(console: Console, path: str) -> None:
    reconfigured(console, ConsoleOptions(is_local=True))
    for host in HERE:
        assert await status(console, path, [host]) in (200, 404), host
    for host in (*ELSEWHERE, *NAMED):
        assert await status(console, path, [host]) == 421, host
    for hosts in ([], ["localhost", "localhost"], ["localhost", "evil.example"]):
        assert await status(console, path, hosts) == 421, hosts


@pytest.mark.parametrize("is_local", [True, False])
async def test_a_console_with_a_public_url_answers_by_its_name_too(console: Console, is_local: bool) -> None:
    reconfigured(console, ConsoleOptions(f"{PUBLIC}:8443", is_local=is_local))
    for host in (*HERE, *NAMED):
        assert await status(console, "/console/sign-in", [host]) == 200, host
    for host in ELSEWHERE:
        assert await status(console, "/console/sign-in", [host]) == 421, host


async def test_a_public_url_that_is_an_address_has_no_name(console: Console) -> None:
    reconfigured(console, ConsoleOptions("http://[2001:db8::1]:8000"))
    assert await status(console, "/console/sign-in", ["[2001:db8::1]:8000"]) == 200
    assert await status(console, "/console/sign-in", ["evil.example"]) == 421


async def test_a_server_of_a_network_without_a_public_url_cannot_know_its_names(console: Console) -> None:
    reconfigured(console, ConsoleOptions())
    for host in ("evil.example", "gateway.internal:8000", "[::1", ""):
        assert await status(console, "/console/sign-in", [host]) == 200


async def test_the_refusal_runs_no_page_and_says_what_to_set(console: Console, signed_in: SignedIn) -> None:
    reconfigured(console, ConsoleOptions(is_local=True))
    person = await signed_in()
    refused = await person.get("/console/keys")
    assert refused.status_code == 421
    assert "public_url" in refused.text and "Host header" in refused.text
    assert person.session.email not in refused.text
    assert "content-security-policy" in refused.headers
    assert (await person.get("/console/keys", host="localhost:8000")).status_code == 200
    sent = await person.post("/console/sign-out", {"csrf": "x"})
    assert sent.status_code == 421
    part = await person.get("/console/keys", **{"hx-request": "true"})
    assert part.status_code == 421 and "public_url" in part.text


async def test_the_api_answers_by_any_name(console: Console) -> None:
    reconfigured(console, ConsoleOptions(is_local=True))
    for path, expected in (("/v1/models", 401), ("/operator/v1/tenants", 401), ("/docs", 200)):
        assert await status(console, path, ["evil.example"]) == expected


async def test_operators_sign_in_through_a_tunnel_beside_the_public_url(console: Console) -> None:
    """The origin of the form is that of the tunnel."""
    reconfigured(console, ConsoleOptions(PUBLIC))
    tunnel, path = "http://localhost:8081", "/operator/console/sign-in"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(console.app), base_url=tunnel) as http:
        fields = Page(await http.get(path)).form(path) | {"email": "nobody@example.com", "password": "wrong"}
        for origin, expected in (
            (tunnel, 422),
            (PUBLIC, 422),
            ("http://localhost:3000", 403),
            ("https://localhost:8081", 403),
        ):
            answer = await http.post(path, data=fields, headers={"origin": origin})
            assert answer.status_code == expected, origin


@pytest.mark.parametrize("end", ["localhost", "127.0.0.1"])
async def test_a_browser_keeps_its_session_through_a_tunnel(console: Console, end: str) -> None:
    """Its cookies are those of TLS, which `public_url` speaks and the tunnel does not."""
    reconfigured(console, ConsoleOptions(PUBLIC))
    await add_person(console.database, "olga@example.com", operator=True)
    async with served(console.app) as url, opened(url.replace("127.0.0.1", end)) as page:
        await page.goto("/operator/console/sign-in")
        await page.get_by_label("Email").fill("olga@example.com")
        await page.get_by_label("Password").fill(PASSWORD)
        await page.get_by_role("button", name="Sign in", exact=True).click()
        await expect(page).to_have_url(re.compile(r"/operator/console$"))
        (name,) = [each["name"] for each in await page.context.cookies() if "operator" in each["name"]]
        assert name == "__Host-loraplex-operator"
        answer = await page.goto("/operator/console")
        assert answer is not None and answer.status == 200 and not answer.request.redirected_from


@pytest.mark.parametrize("passed", ["http://llm.example.com", "http://llm.example.com:3000"])
async def test_by_the_public_name_no_other_port_or_scheme_is_its_origin(
    console: Console, passed: str
) -> None:
    """A proxy may pass the name without its port, and plain: another service of that name then has the request's own address."""
    public, path = f"{PUBLIC}:8443", "/console/sign-in"
    reconfigured(console, ConsoleOptions(public))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(console.app), base_url=passed) as http:
        fields = Page(await http.get(path)).form(path) | {"email": "nobody@example.com", "password": "wrong"}
        for origin, expected in ((public, 422), (passed, 403), (PUBLIC, 403)):
            answer = await http.post(path, data=fields, headers={"origin": origin})
            assert answer.status_code == expected, origin
