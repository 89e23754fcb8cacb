"""Every page of the navigation, wide and narrow, light and dark: complete, within its width, accessible, light in weight."""

import pytest
from tests.end_to_end.console.conftest import Role, Scheme, Visit

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
OUTSIDE = ("/", "/console/sign-in", "/operator/console/sign-in")


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, "light"),
        (360, "dark"),
        pytest.param(1280, "dark", marks=pytest.mark.long),
        pytest.param(360, "light", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("role", ["admin", "operator"])
def test_every_page_of_the_navigation(visit: Visit, role: Role, width: int, scheme: Scheme) -> None:
    """Widths move what is there and schemes colour it: what is wrong with either shows in one of two visits."""
    watched = visit(role, width=width, scheme=scheme)
    page = watched.open(f"{FIRST[role]}/account")
    links = page.locator("nav.side li a").evaluate_all(
        "links => links.map(link => link.getAttribute('href'))"
    )
    assert links
    for path in (*links, f"{FIRST[role]}/account"):
        watched.open(path)
        assert page.locator("h1").count() == 1, path
        watched.check_access()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("role", ["admin", "operator"])
def test_the_navigation_of_a_narrow_page(visit: Visit, role: Role, scheme: Scheme) -> None:
    watched = visit(role, width=360, scheme=scheme)
    page = watched.open(f"{FIRST[role]}/account")
    page.get_by_role("button", name="Open navigation").click()
    assert page.get_by_role("navigation", name="Console").is_visible()
    watched.check_access()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_of_people_who_are_not_signed_in(visit: Visit, scheme: Scheme) -> None:
    for width in (1280, 360):
        watched = visit(None, width=width, scheme=scheme)
        for path in OUTSIDE:
            watched.open(path)
            watched.check_access()


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


def test_the_documentation_is_drawn_without_another_server(visit: Visit) -> None:
    page = visit(None).open("/docs")
    page.get_by_text("/v1/chat/completions").first.wait_for()
