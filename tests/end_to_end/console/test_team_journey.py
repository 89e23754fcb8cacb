"""An admin invites a colleague, who may only look."""

from playwright.sync_api import expect
from tests.end_to_end.console.conftest import PASSWORD, Visit


def test_a_colleague_is_invited_and_may_only_look(visit: Visit) -> None:
    admin = visit("admin")
    page = admin.open("/console/team")
    page.get_by_role("link", name="Invite a person").click()
    page.get_by_label("Email").fill("colleague@example.com")
    page.get_by_label("Role").select_option("viewer")
    page.get_by_role("button", name="Create the link").click()
    page.get_by_role("button", name="Copy Link snippet").click()
    expect(page.get_by_role("status").get_by_text("Copied")).to_be_visible()
    link = page.locator("#link").inner_text()
    assert page.evaluate("navigator.clipboard.readText()") == link
    admin.check_access()

    colleague = visit(None)
    page = colleague.page
    page.goto(link)
    page.get_by_label("Your name").fill("Carol")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Join").click()
    page.get_by_role("navigation", name="Console").wait_for()
    assert page.get_by_role("link", name="Team").count() == 0
    colleague.expected.append("403")
    assert page.goto(f"{colleague.root}/console/team").status == 403  # type: ignore[union-attr]
    expect(page.get_by_text("tenant:admin").first).to_be_visible()
    colleague.check_access()


def test_signing_in_with_a_wrong_password_first(visit: Visit) -> None:
    watched = visit(None, width=360)
    watched.expected.append("422")
    page = watched.open("/console/sign-in?next=/console/account")
    for password in ("wrong", PASSWORD):
        page.get_by_label("Email").fill("vera@example.com")
        page.get_by_label("Password").fill(password)
        page.get_by_role("button", name="Sign in", exact=True).click()
        if password == "wrong":
            expect(page.get_by_text("Email or password is wrong.")).to_be_visible()
            watched.check_access()
    expect(page.get_by_role("heading", name="Account", level=1)).to_be_visible()
