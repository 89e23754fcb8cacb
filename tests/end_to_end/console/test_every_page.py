"""Every page of the navigation, wide and narrow, light and dark: complete, within its width, accessible, light in weight."""

import re

import pytest
from playwright.sync_api import Page
from tests.end_to_end.console.conftest import PASSWORD, People, Role, Scheme, Visit, first_admin_link

MAX_TRANSFERRED = 150_000
WEIGHT = """() => performance.getEntriesByType("navigation").concat(performance.getEntriesByType("resource"))
    .reduce((sum, entry) => sum + entry.transferSize, 0)"""
# When the browser drew the first pixels, and the first text: an entry each, which may come after the load.
PAINT = """() => new Promise(resolve => new PerformanceObserver((_, observer) => {
    const entries = performance.getEntriesByType("paint");
    if (entries.length < 2) return;
    observer.disconnect();
    resolve(Object.fromEntries(entries.map(entry => [entry.name, Math.round(entry.startTime)])));
}).observe({ type: "paint", buffered: true }))"""
FIRST = {"admin": "/console", "viewer": "/console", "operator": "/operator/console"}
OUTSIDE = ("/", "/console/sign-in", "/operator/console/sign-in", "/docs")
FILES = re.compile(r"[/.](json|csv|export)(\?|$)|format=")


def test_every_page_of_a_new_tenant(visit: Visit, people: People) -> None:
    """An admin who was invited a minute ago, in every width and theme."""
    watched = visit(None)
    page = watched.open(first_admin_link(people, "untouched"))
    page.get_by_label("Your name").fill("Nora")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Join").click()
    page.get_by_role("navigation", name="Console").wait_for()
    for path in addresses(page):
        watched.open(path)
        watched.check_everywhere()


@pytest.mark.long
@pytest.mark.parametrize("role", ["admin", "operator"])
def test_every_page_that_a_link_leads_to(visit: Visit, role: Role) -> None:
    """Of a tenant with usage, and of an operator: one page of each kind, in every width and theme."""
    watched = visit(role)
    page, seen, left = watched.open(f"{FIRST[role]}/account"), set[str](), [f"{FIRST[role]}/account"]
    while left:
        path = left.pop(0)
        if kind(path) in seen:
            continue
        seen.add(kind(path))
        watched.open(path)
        assert page.locator("h1").count() == 1, path
        watched.check_everywhere()
        left += addresses(page)
    print(role, len(seen), "pages:", *sorted(seen))
    assert len(seen) >= 20


def addresses(page: Page) -> list[str]:
    """The pages of the same area that a page links to."""
    links = page.locator("nav.side li a, main a:not([download])").evaluate_all(
        "links => links.map(link => new URL(link.href)).filter(each => each.host === location.host)"
        ".map(each => each.pathname + each.search)"
    )
    area = "/operator/console" if "/operator/" in page.url else "/console"
    found = dict.fromkeys(each for each in links if each.startswith(area) and not FILES.search(each))
    return list(found)


def kind(path: str) -> str:
    """A path without what names a thing in it."""
    return re.sub(
        r"(?<=/)([0-9a-f-]{20,}|[A-Za-z0-9]{16}|\d+|pirate|records|support|harbor)(?=/|$)",
        "*",
        path.partition("?")[0],
    )


def test_filters_in_use_stand_on_one_line(visit: Visit) -> None:
    page = visit("admin").open("/console/requests?outcome=completed")
    fields = page.locator("form.filters").locator(".input, .btn")
    bottoms = fields.evaluate_all("each => each.map(one => Math.round(one.getBoundingClientRect().bottom))")
    assert len(bottoms) == 9 and len(set(bottoms)) == 1, bottoms


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("role", ["admin", "operator"])
def test_the_navigation_of_a_narrow_page(visit: Visit, role: Role, scheme: Scheme) -> None:
    watched = visit(role, width=360, scheme=scheme)
    page = watched.open(f"{FIRST[role]}/account")
    page.get_by_role("button", name="Open navigation").click()
    assert page.get_by_role("navigation", name="Console").is_visible()
    watched.check_access()


def test_pages_of_people_who_are_not_signed_in(visit: Visit) -> None:
    watched = visit(None)
    for path in OUTSIDE:
        page = watched.open(path)
        if path == "/docs":
            page.get_by_text("/v1/chat/completions").first.wait_for()
        watched.check_everywhere()


@pytest.mark.parametrize("role", ["admin", "operator"])
def test_a_first_visit_of_each_page_is_light(visit: Visit, role: Role) -> None:
    """Each page in a browser without a cache. `-s` prints what was transferred and when the page was painted."""
    links = visit(role).open(f"{FIRST[role]}/account").locator("nav.side li a")
    for path in links.evaluate_all("links => links.map(link => link.getAttribute('href'))"):
        page = visit(role).open(path)
        weight, paint = page.evaluate(WEIGHT), page.evaluate(PAINT)
        print(f"{path}: {weight:,} bytes, {', '.join(f'{name} {at} ms' for name, at in paint.items())}")
        assert weight < MAX_TRANSFERRED, path
        assert paint.keys() == {"first-paint", "first-contentful-paint"}, path
