"""In a browser: a question of each type is asked and shown with bars, refused at its field, and lost by no failing network."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from playwright.async_api import Page, expect
from tests.platform.conftest import build_tokenizer
from tests.platform.web.browser import Console, SignedIn
from tests.platform.web.console.chromium import accessible, accessible_in_all_looks, watched_page
from tests.platform.web.playground.test_pages import PLAYGROUND, harbor

from loraplex.engine.fake_engine import FakeScript

DECISION = f"{PLAYGROUND}/decision"


@pytest.fixture(scope="module")
def chat_tokenizer() -> Any:
    """The small tokenizer has a token for each letter, but for no word that a predicate is answered with."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["Yes", "No"])
    return tokenizer


@pytest.fixture
async def page(console: Console, signed_in: SignedIn) -> AsyncIterator[Page]:
    """The form for `pirate`, which has a price; no error, and no request to another server, may occur on it."""
    await harbor(console)
    expect.set_options(timeout=60_000)
    async with watched_page(console, await signed_in("developer")) as page:
        await page.goto(PLAYGROUND)
        await page.get_by_role("link", name="Decision").click()
        await page.wait_for_url(f"**{DECISION}")
        await page.get_by_label("Model").fill("pirate")
        yield page


async def test_a_question_of_each_type_has_a_bar_for_each_option(console: Console, page: Page) -> None:
    questions, run = page.locator("#questions fieldset"), page.get_by_role("button", name="Run")
    await expect(questions).to_have_count(3)
    await accessible(page)
    await questions.nth(2).get_by_label("Adapter").fill("pirate@2")
    await page.get_by_label("Input").press("Control+Enter")
    await expect(questions.locator("[data-slot=says]")).to_have_text(
        ["50.0 % true", re.compile(r"^billing, confidence 0.0\s%"), "1.00 of 2, confidence 18.4 %"]
    )
    bars = questions.locator("[data-slot=share]")
    await expect(bars).to_have_text(["50.0 %"] * 2 + ["33.3 %"] * 6)
    assert await questions.nth(1).locator("progress").evaluate_all(
        "bars => bars.map(bar => [bar.ariaLabel, bar.value.toFixed(3)])"
    ) == [["billing", "0.333"], ["technical", "0.333"], ["other", "0.333"]]
    figures = page.locator("#outcome .figures")
    await expect(figures).to_have_text(
        re.compile(r"cached\s*0.*took.*cost\s*\$0\.\d{6}.*calibration\s*none, none", re.DOTALL)
    )
    await expect(page.locator("#outcome [data-slot=adapter]")).to_have_text(["pirate@1", "pirate@2"])
    await accessible_in_all_looks(page)
    rows = console.engine.requests
    assert len(rows) == 3 and {row.sampling.max_tokens for row in rows} == {0}

    # What is edited has no answer any more; what is asked is code.
    await questions.nth(1).get_by_label("Options").fill("10:30\nlater: or never")
    await expect(questions.nth(1).locator("[data-slot=option]")).to_have_text(["10:30", "later"])
    await expect(bars).to_have_text(["50.0 %"] * 2 + ["–"] * 2 + ["33.3 %"] * 3)
    await page.get_by_role("button", name="Copy as curl or Python").click()
    code = await page.locator("#as-curl").inner_text()
    body = json.loads(code.partition("<<'JSON'\n")[2].rpartition("\nJSON")[0])
    assert "/v1/decisions " in code and "client.decisions.create(" in (
        await page.locator("#as-python").text_content() or ""
    )
    assert body["questions"][1]["choices"] == [
        {"value": "10:30"},
        {"value": "later", "description": "or never"},
    ]
    assert [each.get("model") for each in body["questions"]] == [None, None, "pirate@2"]
    await page.keyboard.press("Escape")

    # A reload has the draft; the keyboard adds and removes.
    await page.reload()
    await expect(questions.nth(1).get_by_label("Options")).to_have_value("10:30\nlater: or never")
    await page.get_by_role("button", name="Question", exact=True).press("Enter")
    await page.keyboard.press("s")
    await expect(questions.nth(3).get_by_label("Type")).to_have_value("score")
    await page.get_by_role("button", name="Remove Question 4").press("Enter")
    await expect(questions).to_have_count(3)
    await expect(questions.nth(2).get_by_label("Type")).to_be_focused()
    await run.click()
    await expect(bars).to_have_count(7)
    await expect(figures).to_be_visible()


async def test_a_refusal_stands_at_its_field_and_a_failure_keeps_what_was_typed(
    console: Console, page: Page
) -> None:
    questions, run = page.locator("#questions fieldset"), page.get_by_role("button", name="Run")
    failure = page.locator("#outcome").get_by_role("alert")
    for field, wrong, right, said in (
        (questions.nth(1).get_by_label("Options"), "one", "one\ntwo", "2..255"),
        (questions.nth(2).get_by_label("Options"), "same", "same\nother", "2..10"),
        (questions.nth(0).get_by_label("Adapter"), "nobodys", "pirate@2", "does not exist"),
        (page.get_by_label("Model"), "nobodys", "pirate", "does not exist"),
    ):
        await field.fill(wrong)
        await run.click()
        await expect(field).to_be_focused()
        await expect(field).to_have_attribute("aria-invalid", "true")
        described = (await field.get_attribute("aria-describedby") or "").split()[-1]
        await expect(page.locator(f"#{described}")).to_contain_text(said)
        await expect(failure).to_contain_text(said)
        await field.fill(right)
        await expect(page.locator("[aria-invalid]")).to_have_count(0)
        await expect(failure).to_have_count(0)

    await page.context.set_offline(True)
    await run.click()
    await expect(failure).to_contain_text("The server did not answer")
    await accessible(page)
    await page.context.set_offline(False)
    await failure.get_by_role("button", name="Try again").click()
    await expect(page.locator("#outcome .figures")).to_be_visible()

    console.engine.script = FakeScript(start_delay_s=30)
    await run.click()
    await page.get_by_role("button", name="Stop").click()
    await expect(page.locator("#outcome")).to_have_text("Stopped.")
    await expect(run).not_to_have_attribute("aria-busy", "true")
    await expect(page.get_by_label("Model")).to_have_value("pirate")
