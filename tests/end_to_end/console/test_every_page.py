"""Every page of the navigation, wide and narrow, light and dark: complete, within its width, accessible, light in weight."""

import pytest
from tests.end_to_end.console.conftest import Role, Scheme, Visit

MAX_TRANSFERRED = 150_000
WEIGHT = """() => performance.getEntriesByType("navigation").concat(performance.getEntriesByType("resource"))
    .reduce((sum, entry) => sum + entry.transferSize, 0)"""
FIRST = {"admin": "/console", "viewer": "/console", "operator": "/operator/console"}
OUTSIDE = ("/console/sign-in", "/operator/console/sign-in")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("role", ["admin", "operator"])
def test_every_page_of_the_navigation(visit: Visit, role: Role, width: int, scheme: Scheme) -> None:
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
    if width == 360:
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


def test_a_first_visit_of_each_page_is_light(visit: Visit) -> None:
    links = visit("admin").open("/console/account").locator("nav.side li a")
    for path in links.evaluate_all("links => links.map(link => link.getAttribute('href'))"):
        page = visit("admin").open(path)
        assert page.evaluate(WEIGHT) < MAX_TRANSFERRED, path


def test_the_documentation_is_drawn_without_another_server(visit: Visit) -> None:
    page = visit(None).open("/docs")
    page.get_by_text("/v1/chat/completions").first.wait_for()
