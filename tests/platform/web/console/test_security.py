"""Every page and form: foreign origins, missing and foreign tokens, no session, and headers.

The routes are those of the application: a page without these properties fails when it is added.
"""

from collections.abc import Iterator
from uuid import uuid4

import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from tests.platform.web.browser import ORIGIN, Console, Page, SignedIn

OPEN = ("sign-in", "accept", "reset-password")
"""Last parts of the paths of forms that are sent without a session."""
PARAMETERS = ("entry_id", "session_id", "invoice_id", "tenant_id", "request_id", "webhook_id")


def routes(app: FastAPI, method: str) -> Iterator[str]:
    """The paths of the console that answer to `method`, with values for their parameters."""
    console = app.router.routes[0]._console  # type: ignore[attr-defined]
    for context in iter_route_contexts(console.routes):
        if method in (context.methods or ()) and "/static/" not in str(context.path):
            yield _filled(str(context.path))


def _filled(path: str) -> str:
    parts = [
        (str(uuid4()) if part[1:-1] in PARAMETERS else "1" if "version" in part else "missing")
        if part.startswith("{")
        else part
        for part in path.split("/")
    ]
    return "/".join(parts)


def is_open(path: str) -> bool:
    return path == "/" or path.rpartition("/")[2] in OPEN


def csrf_of(page: Page) -> str:
    return str(page.find("body").attributes["hx-headers"]).split('"')[3]


async def test_no_form_is_taken_from_another_origin_or_another_session(
    console: Console, signed_in: SignedIn
) -> None:
    person, other, operator = await signed_in(), await signed_in(), await signed_in("operator")
    foreign = csrf_of(await other.page("/console/account"))
    tokens = {
        "/console": (person, csrf_of(await person.page("/console/account"))),
        "/operator": (operator, csrf_of(await operator.page("/operator/console/account"))),
    }
    paths = list(routes(console.app, "POST"))
    assert len(paths) > 20
    for path in paths:
        browser, own = tokens[path[: path.index("/", 1)]]
        for headers in (
            {},
            {"origin": "https://evil.example"},
            {"origin": "null"},
            {"origin": f"{ORIGIN}.evil"},
        ):
            response = await browser.http.post(path, data={"csrf": own}, headers=headers)
            assert response.status_code == 403, (path, headers)
        if not is_open(path):
            for token in (None, "", foreign, person.session.csrf_token):
                fields = {} if token is None else {"csrf": token}
                assert (await browser.post(path, fields)).status_code == 403, (path, token)
        as_header = await browser.post(path, {}, **{"x-csrf-token": foreign})
        assert as_header.status_code == 403 or is_open(path), path


async def test_without_a_session_no_page_and_no_form_does_anything(console: Console) -> None:
    http = await console.browser({"loraplex": "made-up", "loraplex-operator": "made-up"})
    for path in routes(console.app, "GET"):
        response = await http.get(path)
        if not is_open(path):
            assert response.status_code == 303, path
            assert "/console/sign-in" in response.headers["location"]
            part = await http.get(path, headers={"hx-request": "true"})
            assert part.status_code == 401 and "Your session ended" in part.text
    for path in routes(console.app, "POST"):
        if not is_open(path):
            response = await http.post(path, data={"csrf": "x"}, headers={"origin": ORIGIN})
            # The playground's script reads a status.
            assert response.status_code == (401 if path == "/console/token" else 303), path


async def test_sessions_of_one_tenant_open_nothing_of_operators(
    console: Console, signed_in: SignedIn
) -> None:
    admin = await signed_in()
    admin.http.cookies.set("loraplex-operator", admin.http.cookies["loraplex"], domain="console.test")
    for path in routes(console.app, "GET"):
        if path.startswith("/operator/") and not is_open(path):
            assert (await admin.get(path)).status_code == 303, path


async def test_every_answer_forbids_other_origins(console: Console, signed_in: SignedIn) -> None:
    person = await signed_in("viewer")
    for path in ("/console/account", "/console/team", "/console/nowhere", "/console/sign-in"):
        headers = (await person.get(path)).headers
        policy = dict(
            part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == headers["cross-origin-opener-policy"] == "same-origin"
        assert "permissions-policy" in headers and headers["cache-control"] == "no-store"


@pytest.mark.parametrize("content", [b"x" * (64 << 10) + b"x", b"a=1&" * 201, b"name=%FF", b"name=%00"])
async def test_forms_are_bounded(console: Console, content: bytes) -> None:
    http = await console.browser()
    headers = {"origin": ORIGIN, "content-type": "application/x-www-form-urlencoded"}
    response = await http.post("/console/sign-in", content=content, headers=headers)
    assert response.status_code == (413 if len(content) > 64 << 10 else 400)


async def test_a_form_that_is_sent_twice_is_one_effect(console: Console, signed_in: SignedIn) -> None:
    admin = await signed_in()
    fields = (await admin.page("/console/team/invite")).form("/console/team/invite")
    fields |= {"email": "vera@example.com", "role": "viewer"}
    first, again = [await admin.post("/console/team/invite", fields) for _ in range(2)]
    assert Page(first).find("#link").text() == Page(again).find("#link").text()
    changed = await admin.post("/console/team/invite", {**fields, "role": "admin"})
    assert changed.status_code == 422 and "Idempotency-Key" in changed.text
