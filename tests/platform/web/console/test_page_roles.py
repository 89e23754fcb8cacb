"""Every page and every form × every role, without a session, with the ids of another tenant, and without a CSRF token.

What a path asks for is written here by its beginning, as the design of the console lists it. A route below no such beginning fails.
"""

import re
from dataclasses import dataclass
from typing import Final
from uuid import uuid4

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from tests.platform.web.browser import ORIGIN, Browser, Console
from tests.platform.web.console.other_tenant import OWNER, ids_of_another_tenant

from loraplex.platform.web.console.cookies import SESSION_COOKIE
from loraplex.platform.web.console_app import ConsoleRoute

ANY: Final = "a session"
OPERATOR: Final = "an operator"
PUBLIC: Final = "nothing"
# The longest beginning of a path counts.
READ: Final = {
    "/": PUBLIC,
    "/console": ANY,
    "/console/account": ANY,
    "/console/first-steps": ANY,
    "/console/switch-tenant": ANY,
    "/console/token": ANY,
    "/console/playground": "inference",
    "/console/adapters": "adapters:read",
    "/console/suites": "adapters:read",
    "/console/keys": "keys:write",
    "/console/requests": "usage:read",
    "/console/usage": "usage:read",
    "/console/choices": "usage:read",
    "/console/limits": "usage:read",
    "/console/billing": "billing:read",
    "/console/webhooks": "billing:read",
    "/console/team": "tenant:admin",
    "/console/audit": "tenant:admin",
    "/operator/console": OPERATOR,
    **{
        f"{area}/{page}": PUBLIC
        for area in ("/console", "/operator/console")
        for page in (
            "sign-in",
            "sign-out",
            "sign-up",
            "accept",
            "reset-password",
            "forgot-password",
            "oidc",
            "static",
        )
    },
}
# What changes something, and the pages that ask for it, where they ask for more than reading does.
WRITE: Final = {
    "/console/adapters": "adapters:write",
    "/console/suites": "adapters:write",
    "/console/webhooks": "tenant:admin",
    "/console/limits/keys": "keys:write",
    "/console/limits/adapters": "adapters:write",
}
ASKING: Final = re.compile(
    r"/(new|edit|delete|move|rollback|rotate|revoke|upload|split|gate|evaluate)$|^/console/limits/(keys|adapters)/"
)
ENDS_THE_SESSION: Final = re.compile(r"/account/sessions/end-all$|/switch-tenant$")
SHORT: Final = len("production")
"""Ids that are no longer may be words of a page."""
ROLES: Final = {
    "admin": {
        *("inference", "adapters:read", "adapters:write", "keys:write", "usage:read", "billing:read"),
        "tenant:admin",
    },
    "developer": {"inference", "adapters:read", "adapters:write", "keys:write", "usage:read"},
    "billing": {"usage:read", "billing:read"},
    "viewer": {"adapters:read", "usage:read"},
}


@dataclass(frozen=True)
class Route:
    """A route of the console, and what it asks for."""

    method: str
    path: str

    @property
    def asks(self) -> str:
        beginning = longest(READ, self.path)
        asked = READ[beginning]
        changes = self.method == "POST" or ASKING.search(self.path)
        wanted = longest(WRITE, self.path) if changes else ""
        return WRITE[wanted] if wanted else asked

    def at(self, ids: dict[str, str]) -> str:
        """Its path with ids in place of the placeholders; what no id is given for becomes one that does not exist."""
        if "/keys/{name}" in self.path and ids:
            ids = ids | {"name": ids["key_id"]}
        return re.sub(r"\{(\w+)(?::\w+)?\}", lambda match: ids.get(match[1], str(uuid4())), self.path)

    @property
    def names_something(self) -> bool:
        return "{" in self.path

    def allows(self, role: str) -> bool:
        return self.asks in (ANY, PUBLIC) or self.asks in ROLES[role]


def longest(table: dict[str, str], path: str) -> str:
    """The longest beginning of `path` in the table, empty without one."""
    found = [each for each in table if path == each or path.startswith((f"{each}/", f"{each}."))]
    return max(found, key=len, default="")


def console_of(app: FastAPI) -> FastAPI:
    (route,) = [each for each in app.router.routes if isinstance(each, ConsoleRoute)]
    return route._console


def routes_of(app: FastAPI) -> list[Route]:
    return [
        Route(method, context.path)
        for context in iter_route_contexts(console_of(app).routes)
        if context.path is not None
        for method in sorted((context.methods or {"GET"}) - {"HEAD"})
    ]


def guarded(console: Console) -> list[Route]:
    """The routes that ask for a session, those that end it last."""
    found = [route for route in routes_of(console.app) if route.asks != PUBLIC]
    return sorted(found, key=lambda route: ENDS_THE_SESSION.search(route.path) is not None)


async def send(
    client: httpx.AsyncClient, route: Route, path: str, csrf: str | None, origin: str = ORIGIN
) -> httpx.Response:
    """A page is opened; a form is sent without any field but the token."""
    if route.method == "GET":
        return await client.get(path)
    fields = {} if csrf is None else {"csrf": csrf}
    return await client.request(route.method, path, data=fields, headers={"origin": origin})


async def token_of(browser: Browser, path: str = "/console/account") -> str:
    """The CSRF token of a session, as its pages have it."""
    fields = (await browser.page(path)).all('input[name="csrf"]')
    return str(fields[0].attributes["value"])


def test_every_route_asks_for_something(console: Console) -> None:
    routes = routes_of(console.app)
    assert not [
        route
        for route in routes
        if route.path != "/console" and longest(READ, route.path) in ("", "/console")
    ]
    assert {route.method for route in routes} <= {"GET", "POST"}


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_reaches_what_its_scopes_allow(console: Console, role: str) -> None:
    browser = await console.signed_in(role)
    csrf = await token_of(browser)
    for route in guarded(console):
        answer = await send(browser.http, route, route.at({}), csrf)
        about = f"{role}: {route}: {answer.status_code}"
        if route.asks == OPERATOR:
            assert_sign_in(answer, "/operator/console", about)
        elif not route.allows(role):
            assert answer.status_code == 403, about
            assert route.asks in answer.text, f"{about}: the page does not name the scope"
        else:
            assert answer.status_code < 500 and answer.status_code != 403, about


async def test_operators_reach_every_page_of_their_area(console: Console) -> None:
    browser = await console.signed_in("operator")
    csrf = await token_of(browser, "/operator/console/audit")
    for route in guarded(console):
        if route.asks == OPERATOR:
            answer = await send(browser.http, route, route.at({}), csrf)
            assert answer.status_code < 500 and answer.status_code not in (401, 403), (
                f"{route}: {answer.status_code}"
            )


async def test_without_a_session_every_page_leads_to_the_sign_in(console: Console) -> None:
    client = await console.browser()
    for route in guarded(console):
        answer = await send(client, route, route.at({}), "x" * 64)
        assert_sign_in(answer, "/operator/console" if route.asks == OPERATOR else "/console", str(route))


async def test_a_session_of_one_area_opens_no_page_of_the_other(console: Console) -> None:
    """Nor with its token under the other area's cookie."""
    admin, operator = await console.signed_in("admin"), await console.signed_in("operator")
    tenant, area = SESSION_COOKIE["tenant"], SESSION_COOKIE["operator"]
    swapped = await console.browser({area: admin.http.cookies[tenant], tenant: operator.http.cookies[area]})
    for route in guarded(console):
        other = admin if route.asks == OPERATOR else operator
        for client in (other.http, swapped):
            answer = await send(client, route, route.at({}), "x" * 64)
            assert_sign_in(answer, "/operator/console" if route.asks == OPERATOR else "/console", str(route))


async def test_nothing_of_another_tenant_exists(console: Console) -> None:
    ids = await ids_of_another_tenant(console)
    browser = await console.signed_in("admin")
    csrf = await token_of(browser)
    for route in guarded(console):
        if route.asks == OPERATOR or not route.names_something:
            continue
        missing = await send(browser.http, route, route.at({}), csrf)
        theirs = await send(browser.http, route, route.at(ids), csrf)
        about = f"{route}: {missing.status_code}, {theirs.status_code}"
        # Whatever is answered about an id that does not exist is answered about theirs.
        assert theirs.status_code == missing.status_code, about
        assert theirs.status_code in (303, 404, 422), about
        # An answer may repeat what it was asked for, and nothing else of theirs.
        others = [each for each in (*ids.values(), OWNER) if len(each) > SHORT and each not in route.at(ids)]
        assert not [each for each in others if each in theirs.text], about
    # That the ids are real is what makes the above a test: their owner finds them all.
    owner = await console.signed_in("admin", OWNER)
    pages = [route for route in guarded(console) if route.method == "GET" and route.names_something]
    found = {
        route.path: (await owner.get(route.at(ids))).status_code for route in pages if route.asks != OPERATOR
    }
    assert not {path: status for path, status in found.items() if status != 200}


async def test_no_form_is_taken_without_the_token_and_the_origin(console: Console) -> None:
    for role, home in (("admin", "/console/account"), ("operator", "/operator/console/audit")):
        browser = await console.signed_in(role)
        other = await token_of(await console.signed_in("admin"))
        own = await token_of(browser, home)
        for route in routes_of(console.app):
            is_open = route.asks == PUBLIC and not route.path.endswith("/sign-out")
            if (
                route.method == "GET"
                or is_open
                or route.path.startswith("/operator") is not (role == "operator")
            ):
                continue
            for csrf, origin in ((None, ORIGIN), (other, ORIGIN), (own, "https://evil.example")):
                answer = await send(browser.http, route, route.at({}), csrf, origin)
                assert answer.status_code == 403, f"{route}: {csrf}, {origin}: {answer.status_code}"


def assert_sign_in(answer: httpx.Response, area: str, about: str) -> None:
    """The answer leads to the sign-in of the area, or, to a form, refuses it."""
    if answer.status_code == 303:
        assert answer.headers["location"].startswith(f"{area}/sign-in"), about
    else:
        assert answer.status_code in (401, 403), f"{about}: {answer.status_code}"
