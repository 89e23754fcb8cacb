"""A tenant's first day: a key, an adapter, its report and alias, the first request, its usage and the bill."""

import re
from pathlib import Path

import httpx
from playwright.sync_api import Page, expect
from tests.end_to_end.console.conftest import People, Visit, Watched

ADAPTER = Path(__file__).parents[3] / "platform" / "demo" / "adapters" / "pirate"
FILES = [ADAPTER / "adapter_config.json", ADAPTER / "adapter_model.safetensors"]
VALIDATED_MS = 120_000


def test_from_a_key_to_the_bill(visit: Visit, people: People) -> None:
    admin = visit("admin")
    key = created_key(admin)
    uploaded_adapter(admin)
    body = {"model": "parrot", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    answered = httpx.post(
        f"{people.demo.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
    )
    assert answered.status_code == 200, answered.text
    seen_on(admin.open("/console/usage"), "parrot")
    admin.check_access()
    page = admin.open("/console/requests")
    expect(page.get_by_role("cell", name=re.compile("parrot")).first).to_be_visible()
    page = admin.open("/console/billing")
    expect(
        page.get_by_role("heading", name=re.compile("draft|this month", re.IGNORECASE)).first
    ).to_be_visible()
    admin.check_access()


def created_key(admin: Watched) -> str:
    """Create a key and store its text, which is shown once."""
    page = admin.open("/console/keys/new")
    page.get_by_label("Name", exact=True).fill("journey")
    page.get_by_role("button", name="Create key").click()
    dialog = page.get_by_role("dialog", name="Store this key now")
    expect(dialog).to_be_visible()
    key = page.locator("#secret").inner_text()
    admin.check_access()
    page.keyboard.press("Escape")
    expect(dialog).to_be_visible()
    dialog.get_by_role("checkbox").check()
    dialog.get_by_role("button", name="Done").click()
    expect(page.get_by_role("link", name="journey", exact=True)).to_be_visible()
    assert key not in page.content()
    return key


def uploaded_adapter(admin: Watched) -> None:
    """Upload an adapter, read its report and let `production` lead to it."""
    page = admin.open("/console/adapters/new")
    page.get_by_label("Name", exact=True).fill("parrot")
    page.get_by_role("button", name="Create adapter").click()
    page.locator("#files").set_input_files(FILES)
    report = page.locator("#report")
    expect(report.get_by_text("ready", exact=True)).to_be_visible(timeout=VALIDATED_MS)
    admin.check_access()
    report.get_by_role("link", name="Move production here").click()
    page.get_by_role("button", name=re.compile("Create alias|Move alias")).click()
    expect(page.get_by_role("heading", name="parrot:production")).to_be_visible()
    admin.check_access()


def seen_on(page: Page, text: str) -> None:
    """Usage is on its page some seconds after it was settled."""
    for _ in range(30):
        if page.get_by_role("row", name=re.compile(text)).count():
            return
        page.wait_for_timeout(2000)
        page.reload()
    raise AssertionError(f"{text} is not on {page.url}")
