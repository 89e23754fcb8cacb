"""In a browser: two models call a tool and get its result, an answer is stopped, a failed one asked again; all of it is text."""

import json
import re
from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Page, expect
from tests.platform.web.browser import Browser, Console, SignedIn
from tests.platform.web.console.chromium import accessible, watched_page
from tests.platform.web.playground.test_pages import PLAYGROUND, harbor

from loraplex.engine.fake_engine import FakeScript, Fault

CALL = (
    "<tool_call>\n",
    '{"name": "ferry_times", "arguments"',
    ': {"to": "Capri", "day": "sunday"}}\n</tool_call>',
)
HOSTILE = '<img src=x onerror="document.title=1">'


@pytest.fixture
async def person(console: Console, signed_in: SignedIn) -> Browser:
    """A developer whose tenant has two versions of `pirate`, which have a price."""
    await harbor(console)
    return await signed_in("developer")


@pytest.fixture
async def page(console: Console, person: Browser) -> AsyncIterator[Page]:
    """The playground with both versions; no error, and no request to another server, may occur on it."""
    async with watched_page(console, person) as page:
        await page.goto(f"{PLAYGROUND}?model=pirate@1&against=pirate@2")
        yield page


async def test_a_tool_is_called_its_result_returned_and_an_answer_stopped(
    console: Console, page: Page
) -> None:
    expect.set_options(timeout=60_000)
    engine, answers = console.engine, page.locator("article.msg")
    await accessible(page)
    engine.script = FakeScript(answers=(CALL,))
    await page.get_by_role("button", name="A tool").click()
    await page.get_by_role("button", name="Send to both").click()
    await expect(answers.locator(".call code")).to_have_text(
        ['ferry_times({"to": "Capri", "day": "sunday"})'] * 2
    )
    await expect(answers.locator("[data-slot=cost]")).to_have_text([re.compile(r"^\$0\.\d{6}$")] * 2)

    engine.script = FakeScript(answers=((HOSTILE, " 17:25"),), token_interval_s=0.01)
    await page.get_by_label("Result of ferry_times, for both").fill('{"departures": ["17:25"]}')
    await page.get_by_role("button", name="Send to both").click()
    await expect(answers.locator("[data-slot=text]").last).to_have_text(f"{HOSTILE} 17:25")
    await expect(page.locator("#send")).to_be_enabled()
    assert await page.locator("#turns img").count() == 0 and await page.title() != "1"
    await accessible(page)

    engine.script = FakeScript(token_interval_s=0.05)
    await page.get_by_label("Compare two").uncheck()
    await page.get_by_label("Message").fill("Tell a long story.")
    await page.get_by_label("Message").press("Control+Enter")
    await expect(answers.last.locator("[data-slot=text]")).to_have_text(re.compile(r"\w"))
    await page.keyboard.press("Escape")
    await expect(answers.last.get_by_text("stopped")).to_be_visible()
    await expect(page.locator("#send")).to_be_enabled()

    # What was said is in this tab after a reload, and only there.
    await page.reload()
    await expect(answers).to_have_count(5)
    engine.script, engine._injected = FakeScript(faults=(Fault(kind="fail", code="overloaded"),)), [0]
    await page.get_by_label("Message").fill("Again?")
    await page.get_by_role("button", name="Send", exact=True).click()
    failed = answers.last.get_by_role("alert")
    await expect(failed).to_contain_text(re.compile(r"\d{3} \w+"))
    await accessible(page)
    engine.script = FakeScript(answers=(("Aye.",),))
    await failed.get_by_role("button", name="Try again").click()
    await expect(answers.last.locator("[data-slot=text]")).to_have_text("Aye.")

    await page.get_by_role("button", name="Copy as curl or Python").click()
    code = await page.locator("#as-curl").inner_text()
    body = json.loads(code.partition("<<'JSON'\n")[2].rpartition("\nJSON")[0])
    assert "Bearer $KEY" in code and "lpx_" not in await page.content()
    assert body["model"] == "pirate@1" and body["messages"][-1] == {"role": "user", "content": "Again?"}
    roles = [each["role"] for each in body["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant", "user"]


async def test_thought_stands_above_the_answer_and_goes_into_the_next_turn(
    console: Console, page: Page
) -> None:
    engine, answers = console.engine, page.locator("article.msg")
    engine.script = FakeScript(answers=(("<think>", f"Is it {HOSTILE}?", "</think>", "\n\n17:25"),))
    for text in ("When?", "Sure?"):
        await page.get_by_label("Message", exact=True).fill(text)
        await page.get_by_role("button", name="Send to both").click()
        await expect(page.locator("#send")).to_be_enabled()
    thinking = answers.nth(1)
    await expect(thinking.locator("[data-slot=thought]")).to_have_text(f"Is it {HOSTILE}?")
    await expect(thinking.locator("[data-slot=text]")).to_have_text("17:25")
    await accessible(page)
    await page.get_by_role("button", name="Copy as curl or Python").click()
    assert json.dumps(f"Is it {HOSTILE}?") in await page.locator("#as-curl").inner_text()
