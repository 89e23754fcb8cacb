"""Requests to the console have access lines: the path of the page with its placeholders, and the tenant of the session."""

from structlog.testing import capture_logs
from tests.platform.web.browser import Console, SignedIn

from loraplex.platform.observability.access_log import log_request


async def test_pages_are_logged_by_their_routes(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in("admin")
    built = [getattr(each.cls, "keywords", {}) for each in console.app.user_middleware]
    (observed,) = [keywords for keywords in built if "observers" in keywords]
    observed["observers"] = [log_request]
    with capture_logs() as logged:
        await browser.get("/console/billing")
        await browser.get("/console/billing/invoices/kanarienvogel?kanarienvogel=1")
        await browser.get("/console/static/tokens.css")
        await browser.get("/console/kanarienvogel")
        refused = await browser.post("/console/token", {"scope": "kanarienvogel"})
    *pages, token = [line for line in logged if line["event"] == "request"]
    assert [line.get("code") for line in pages] == [None, *3 * ["not_found"]]
    assert token["code"] == refused.json()["error"]["code"] == "form_refused"
    handlers = [line["handler"] for line in pages]
    assert handlers[0] == "/console/billing" and "{" in handlers[1]
    assert handlers[2:] == ["/console/static/{name:path}", "none"]
    assert logged[0]["tenant_id"] == str(browser.session.tenant_id)
    assert "kanarienvogel" not in str(logged)
