"""A tenant's first day: a key, an adapter, its report and alias, its usage and the bill; a tool call in the playground with `--long`."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect
from tests.end_to_end.console.conftest import People, Visit, Watched

ADAPTER = Path(__file__).parents[3] / "platform" / "demo" / "adapters" / "pirate"
FILES = [ADAPTER / "adapter_config.json", ADAPTER / "adapter_model.safetensors"]
VALIDATED_MS = ANSWERED_MS = 120_000
# No text of the model's own choice: a model of this size calls no tool unasked, and one that must is done in a few tokens.
FERRIES = {"type": "object", "required": ["to", "day"], "additionalProperties": False}
FERRIES["properties"] = {"to": {"enum": ["Capri", "Ischia"]}, "day": {"enum": ["sunday", "weekday"]}}
TOOL = {"type": "function", "function": {"name": "ferry_times", "parameters": FERRIES}}
CALL = re.compile(r'^ferry_times\(\{"to": ?"(Capri|Ischia)", ?"day": ?"(sunday|weekday)"\}\)$')


def test_from_a_key_to_the_bill(visit: Visit, people: People, request: pytest.FixtureRequest) -> None:
    admin = visit("admin")
    key = created_key(admin)
    uploaded_adapter(admin)
    body = {"model": "parrot", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    answered = httpx.post(
        f"{people.demo.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
    )
    assert answered.status_code == 200, answered.text
    if request.config.getoption("--long"):
        asked = asked_in_playground(admin)
        roles = [each["role"] for each in asked["messages"]]
        assert roles == ["user", "assistant", "tool", "assistant", "user"]
    seen_on(admin.open("/console/usage"), "parrot")
    expect(admin.page.locator("figure.chart canvas").first).to_be_visible()
    admin.check_access()
    page = admin.open("/console/requests")
    expect(page.get_by_role("cell", name=re.compile("parrot")).first).to_be_visible()
    page = admin.open("/console/billing")
    expect(page.get_by_text("Draft of")).to_be_visible()
    admin.check_access()
    page.get_by_role("link", name="Open the draft").click()
    expect(page).to_have_url(re.compile("/console/billing/invoices/draft"))


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


def asked_in_playground(admin: Watched) -> dict[str, Any]:
    """Make the model call a tool, return its result, stop an answer; return the body of the last request, as it is copied."""
    page = admin.open("/console/playground?model=parrot:production")
    answers, send = page.locator("article.msg"), page.get_by_role("button", name="Send", exact=True)
    page.get_by_text("Tools", exact=True).click()
    page.get_by_label("Tools as JSON").fill(json.dumps([TOOL]))
    page.keyboard.press("Tab")
    page.get_by_label("tool_choice").select_option("tool:ferry_times")
    page.get_by_label("Message").fill("When does the last ferry leave?")
    send.click()
    expect(answers.locator(".call code")).to_have_text(CALL, timeout=ANSWERED_MS)
    expect(answers.locator("[data-slot=cost]")).to_have_text(re.compile(r"^\$0\.\d{6}$"), timeout=ANSWERED_MS)
    expect(answers.locator("[data-slot=first]")).to_have_text(re.compile(r"^\d.*\sm?s$"))
    admin.check_access()

    page.get_by_label("tool_choice").select_option("none")
    page.get_by_label("max_tokens").fill("24")
    page.get_by_label("Result of ferry_times").fill('{"departures": ["17:25"]}')
    send.click()
    expect(answers.nth(1).locator("[data-slot=cost]")).to_contain_text("$", timeout=ANSWERED_MS)
    expect(answers.nth(1).locator("[data-slot=text]")).to_have_text(re.compile(r"\w"))

    page.get_by_label("max_tokens").fill("2000")
    page.get_by_label("Message").fill("Tell a long story.")
    page.keyboard.press("Control+Enter")
    expect(answers.nth(2).locator("[data-slot=text]")).to_have_text(re.compile(r"\w"), timeout=ANSWERED_MS)
    page.keyboard.press("Escape")
    expect(answers.nth(2).get_by_text("stopped")).to_be_visible()
    expect(send).to_be_enabled()
    admin.check_access()

    page.get_by_role("button", name="Copy as curl or Python").click()
    code = page.locator("#as-curl").inner_text()
    assert "Bearer $KEY" in code
    body: dict[str, Any] = json.loads(code.partition("<<'JSON'\n")[2].rpartition("\nJSON")[0])
    return body


def seen_on(page: Page, text: str) -> None:
    """Usage is on its page some seconds after it was settled."""
    for _ in range(30):
        if page.get_by_role("row", name=re.compile(text)).count():
            return
        page.wait_for_timeout(2000)
        page.reload()
    raise AssertionError(f"{text} is not on {page.url}")
