"""What every page shares: sessions, scopes, headers, errors, forms."""

from tests.platform.web.browser import Console, SignedIn


async def test_a_page_of_a_session(signed_in: SignedIn) -> None:
    browser = await signed_in("viewer")
    page = await browser.page("/console/account")
    assert page.find("h1").text() == "Account"
    assert page.find("title").text() == "Account · harbor · loraplex"
    assert page.response.headers["cache-control"] == "no-store"
    assert "default-src 'none'" in page.response.headers["content-security-policy"]


async def test_without_a_session_one_signs_in_and_comes_back(console: Console) -> None:
    http = await console.browser()
    response = await http.get("/console/account?tab=sessions")
    assert response.status_code == 303
    assert response.headers["location"] == "/console/sign-in?next=%2Fconsole%2Faccount%3Ftab%3Dsessions"


async def test_a_page_that_does_not_exist(signed_in: SignedIn) -> None:
    response = await (await signed_in()).get("/console/nowhere")
    assert response.status_code == 404
    assert "There is no such page." in response.text
    assert response.headers["x-request-id"] in response.text
