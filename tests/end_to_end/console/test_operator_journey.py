"""An operator creates a tenant, limits it, sees the limit enforced, and looks at where a request's time went."""

import httpx
from playwright.sync_api import expect
from tests.end_to_end.console.conftest import People, Visit
from tests.end_to_end.live_server import until

TENANT = "journey"


def requests_of(people: People, key: str) -> list[httpx.Response]:
    """Two requests of a tenant that may send one per minute."""
    body = {
        "model": people.demo.access.model,
        "messages": [{"role": "user", "content": "What is rain?"}],
        "max_tokens": 24,
    }
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=people.demo.url, headers=headers, timeout=120) as tenant:
        return [tenant.post("/v1/chat/completions", json=body) for _ in range(2)]


def test_a_tenant_is_created_limited_and_looked_into(visit: Visit, people: People) -> None:
    operator = visit("operator")
    page = operator.open("/operator/console")
    page.get_by_role("link", name="New tenant").click()
    page.get_by_label("Name", exact=True).fill(TENANT)
    page.get_by_role("button", name="Create tenant").click()
    expect(page.get_by_role("heading", name=f"{TENANT} is created", level=1)).to_be_visible()
    key = page.locator("#key").inner_text()
    operator.check_access()
    page.get_by_label("I have stored it").check()
    page.get_by_role("button", name="Done").click()
    page.get_by_label("Requests per minute", exact=True).fill("1")
    page.get_by_role("button", name="Save limits").click()
    expect(page.get_by_role("status").get_by_text("The limits apply to the next request")).to_be_visible()
    operator.check_access()

    served, refused = requests_of(people, key)
    assert (served.status_code, refused.status_code) == (200, 429), refused.text

    page.get_by_role("button", name="Look as tenant").click()
    warning = page.get_by_text(f"You look into {TENANT} as an operator.")
    expect(warning).to_be_visible()
    page = operator.open(f"/console/limits/explain?request={refused.headers['x-request-id']}")
    expect(page.get_by_role("heading", name="Decision, limit by limit")).to_be_visible()
    expect(page.locator(".chip.bad", has_text="refused").first).to_be_visible()
    address = f"/console/requests/{served.headers['x-request-id']}"
    until(lambda: page.request.get(operator.root + address).ok, 60, "the request is in the ledger")
    page = operator.open(address)
    expect(page.get_by_role("heading", name="Where the time went")).to_be_visible()
    expect(page.get_by_text("Decode").first).to_be_visible()
    expect(warning).to_be_visible()
    operator.check_access()
