"""Chromium on the live demo: people signed in once, and pages that are watched for what must never happen."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args
from urllib.parse import urlsplit

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright
from selectolax.lexbor import LexborHTMLParser
from tests.end_to_end.live_server import LiveServer
from tests.end_to_end.test_client import ask

CHROMIUM: Final = Path("/usr/bin/chromium")
REQUIRED: Final = "LORAPLEX_REQUIRE_CHROMIUM"
PASSWORD: Final = "correct horse battery"
WIDTHS: Final = (1280, 768, 360)
FRAMES: Final = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
LISTED_FINDINGS: Final[Mapping[str, str]] = {}
"""Findings of axe that are accepted: rule -> reason."""

Scheme: TypeAlias = Literal["light", "dark"]
Role: TypeAlias = Literal["admin", "operator", "viewer"]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Debian's Chromium. It ends with the file: tests beside it have event loops of their own."""
    if not CHROMIUM.exists():
        reason = f"{CHROMIUM} is missing: apt-get install chromium"
        pytest.fail(reason) if os.environ.get(REQUIRED) else pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass(frozen=True)
class People:
    """The tokens of sessions by role: an admin and a viewer of the demo's first tenant, and the first operator."""

    demo: LiveServer
    tokens: Mapping[Role, tuple[str, str]]


@pytest.fixture(scope="session")
def people(demo: LiveServer) -> People:
    """Sign in by the links that the demo printed; the admin invites the viewer. The demo has answered once."""
    ask(demo.client(), demo.access.tenants[0].adapters[0], "What is rain?", max_tokens=8)
    link = demo.access.console_url
    assert link is not None
    with httpx.Client(base_url=demo.url, headers={"origin": demo.url}) as admin:
        assert admin.get(link).status_code == 303
        shown = _submitted(
            admin, "/console/team/invite", "/console/team/invite", email="vera@example.com", role="viewer"
        )
        invitation = LexborHTMLParser(shown.text).css_first("#link")
        assert invitation is not None
        tokens = {
            "admin": ("loraplex", admin.cookies["loraplex"]),
            "viewer": _accepted(demo, invitation.text(), name="Vera"),
            "operator": _accepted(demo, _first_run_link(demo), name="Olga", email="olga@example.com"),
        }
    return People(demo, tokens)  # type: ignore[arg-type]


def first_admin_link(people: People, tenant: str) -> str:
    """Create a tenant as an operator and invite its first admin; return the path of the link."""
    with httpx.Client(
        base_url=f"{people.demo.url}/operator/v1/",
        headers={"authorization": f"Bearer {people.demo.access.operator_key}"},
    ) as operator:
        made = operator.post("tenants", json={"name": tenant}).raise_for_status().json()
        invited = operator.post(f"tenants/{made['id']}/users", json={"email": f"admin@{tenant}.example"})
    path: str = invited.raise_for_status().json()["invitation_path"]
    return path


def _first_run_link(demo: LiveServer) -> str:
    found = re.search(r"http://\S+/operator/console/sign-in\?token=\S+", demo.banner)
    assert found, demo.banner
    return found[0]


def _accepted(demo: LiveServer, link: str, **fields: str) -> tuple[str, str]:
    area = urlsplit(link).path.removesuffix("/sign-in")
    with httpx.Client(base_url=demo.url, headers={"origin": demo.url}) as client:
        _submitted(client, link, f"{area}/accept", password=PASSWORD, **fields)
        ((name, value),) = client.cookies.items()
        return name, value


def _submitted(client: httpx.Client, page: str, action: str, **fields: str) -> httpx.Response:
    """Open a page and send its form with `action`."""
    form = LexborHTMLParser(client.get(page).text).css_first(f'form[action="{action}"]')
    assert form is not None
    hidden = {str(node.attributes["name"]): node.attributes.get("value") or "" for node in form.css("input")}
    response = client.post(action, data={**hidden, **fields})
    assert response.status_code < 400, response.text
    return response


@dataclass
class Watched:
    """A page of the console in Chromium. `findings`: errors and foreign requests so far, which a test must not have."""

    page: Page
    root: str
    findings: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)
    """Texts that an error message may contain, such as the status of a form that is refused on purpose."""

    def watch(self) -> None:
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.findings.append(f"{self.page.url}: {error}"))
        self.page.on("request", self._on_request)

    def open(self, path: str) -> Page:
        """Open a page, which must be there and must not scroll sideways."""
        response = self.page.goto(self.root + path)
        assert response is not None and response.status == 200, f"{path}: {response and response.status}"
        self.check_room()
        return self.page

    def check_room(self) -> None:
        """The page as a whole must not scroll sideways."""
        wide = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        if wide > 0:
            self.findings.append(f"{self.page.url}: {wide} px too wide")

    def check_access(self) -> None:
        """Run axe: every finding counts, whatever its severity."""
        response: Any = Axe().run(self.page).response
        for violation in response["violations"]:
            if violation["id"] not in LISTED_FINDINGS:
                targets = [node["target"] for node in violation["nodes"]]
                self.findings.append(f"{self.page.url}: axe {violation['id']}: {targets[:5]}")

    def check_everywhere(self) -> None:
        """Check the page's room and run axe in each width and theme; then the page is as wide as before."""
        size: Any = self.page.viewport_size
        for width in WIDTHS:
            self.page.set_viewport_size({"width": width, "height": 800})
            # Charts follow in the next frame.
            self.page.evaluate(FRAMES)
            self.check_room()
            for scheme in get_args(Scheme):
                # A theme that fades in has other colours for a moment.
                self.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
                self.check_access()
        self.page.set_viewport_size(size)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not any(text in message.text for text in self.expected):
            self.findings.append(f"{self.page.url}: {message.text}")

    def _on_request(self, request: Request) -> None:
        if not request.url.startswith((f"{self.root}/", "data:", "blob:")):
            self.findings.append(f"{self.page.url}: asked {request.url}")


Visit: TypeAlias = Callable[..., Watched]


@pytest.fixture
def visit(chromium: Browser, people: People) -> Iterator[Visit]:
    """`visit("admin", width=360, scheme="dark")`: a watched page of a browser that is signed in; None is signed out."""
    watched: list[Watched] = []
    with ExitStack() as stack:

        def visit(role: Role | None, *, width: int = 1280, scheme: Scheme = "light") -> Watched:
            size: Any = {"width": width, "height": 800}
            context = chromium.new_context(viewport=size, color_scheme=scheme)
            stack.callback(context.close)
            context.grant_permissions(["clipboard-read", "clipboard-write"])
            if role is not None:
                name, value = people.tokens[role]
                context.add_cookies([{"name": name, "value": value, "url": people.demo.url}])
            watched.append(Watched(context.new_page(), people.demo.url))
            watched[-1].watch()
            return watched[-1]

        yield visit
    assert [finding for each in watched for finding in each.findings] == []
