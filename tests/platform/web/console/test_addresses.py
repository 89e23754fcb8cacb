"""Addresses: what a page links to and what its forms are sent to exists for its reader, and no text in an address makes the server fail."""

import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, urljoin, urlsplit

from selectolax.lexbor import LexborNode
from tests.platform.web.browser import Browser, Console, Page
from tests.platform.web.console.other_tenant import OWNER, ids_of_another_tenant
from tests.platform.web.console.test_page_roles import ENDS_THE_SESSION, OPERATOR, Route, guarded, routes_of

ROLES: Final = ("admin", "developer", "billing", "viewer", "operator")
SENT_BY: Final = {"action": "", "formaction": "", "hx-get": "GET", "hx-post": "POST"}
"""Attributes with the address of a request, and its method; an action has that of its form."""
HOSTILE: Final = ("%00", "9" * 20, "-1%FF" + "x" * 300)
PARAMETERS: Final = (
    *("after", "before", "state", "search", "version", "compare", "range", "from", "to", "bucket", "split"),
    *(
        "adapter",
        "key",
        "currency",
        "outcome",
        "slower",
        "tenant",
        "month",
        "name",
        "actor",
        "action",
        "target",
    ),
    *("request", "model", "against", "token", "next"),
)
SEVERAL: Final = 10


@dataclass
class Crawl:
    """One person's way through all links. `wrong`: where a page leads to nothing."""

    browser: Browser
    routes: list[tuple[str, re.Pattern[str]]]
    seen: set[tuple[str, frozenset[str]]] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    async def follow(self, address: str) -> None:
        """Open every page that links lead to. Addresses that differ in the values of their query only are one."""
        waiting = [(address, "")]
        while waiting:
            address, linked_from = waiting.pop()
            parts = urlsplit(address)
            place = parts.path, frozenset(name for name, _ in parse_qsl(parts.query))
            if place in self.seen:
                continue
            self.seen.add(place)
            answer = await self.browser.get(address)
            if answer.status_code == 303:
                waiting.append((urljoin(address, answer.headers["location"]), linked_from))
            elif answer.status_code != 200:
                self.wrong.append(f"{linked_from} leads to {address}: {answer.status_code}")
            elif answer.headers["content-type"].startswith("text/html"):
                waiting += [(each, address) for each in self._targets(Page(answer), address)]

    def _targets(self, page: Page, address: str) -> list[str]:
        targets = [urljoin(address, node.attributes["href"] or "") for node in page.all("a[href]")]
        for name, method in SENT_BY.items():
            for node in page.all(f"[{name}]"):
                target = urljoin(address, node.attributes[name] or address)
                wanted = method or _method(node)
                if not any(
                    each == wanted and path.fullmatch(urlsplit(target).path) for each, path in self.routes
                ):
                    self.wrong.append(f"{address} sends {wanted} {target}")
                if wanted == "GET":
                    targets.append(target)
        return [each for each in targets if "console" in urlsplit(each).path and not urlsplit(each).netloc]


def _method(node: LexborNode) -> str:
    form: LexborNode | None = node
    while form is not None and form.tag != "form":
        form = form.parent
    assert form is not None
    return (form.attributes.get("method") or "get").upper()


def pattern(route: Route) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{\w+(:\w+)?\}", "[^/]+", route.path))


async def test_every_link_leads_to_a_page_and_every_form_to_a_route(console: Console) -> None:
    await ids_of_another_tenant(console)
    routes = [(route.method, pattern(route)) for route in routes_of(console.app)]
    for role in ROLES:
        crawl = Crawl(await console.signed_in(role, OWNER), routes)
        await crawl.follow("/operator/console" if role == "operator" else "/console")
        assert not crawl.wrong, f"{role}:\n" + "\n".join(crawl.wrong)
        assert len(crawl.seen) > SEVERAL, role


async def test_no_text_of_an_address_makes_the_server_fail(console: Console) -> None:
    ids = await ids_of_another_tenant(console) | {"tenant_id": str(await console.tenant(OWNER))}
    browsers = {True: await console.signed_in("operator"), False: await console.signed_in("admin", OWNER)}
    failed = []
    for route in guarded(console):
        if route.method != "GET" or ENDS_THE_SESSION.search(route.path):
            continue
        # Each parameter twice: the first of two may be read, or the last.
        query = [[f"{name}={text}" for name in PARAMETERS * 2] for text in HOSTILE]
        addresses = [f"{route.at(ids)}?{'&'.join(each)}" for each in query]
        for placeholder in re.findall(r"\{(\w+)", route.path):
            named = [route.path.replace(f"{{{placeholder}}}", text) for text in HOSTILE[:2]]
            addresses += [Route("GET", path).at(ids) for path in named]
        for address in addresses:
            status = (await browsers[route.asks == OPERATOR].get(address)).status_code
            if status >= 500:
                failed.append(f"{address[:120]}: {status}")
    assert not failed, "\n".join(failed)
