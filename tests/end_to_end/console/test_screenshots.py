"""Takes the pictures of `tests/screenshots/`, which the README shows; `pytest --long` renews them."""

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from tests.end_to_end.console.conftest import People, Visit
from tests.end_to_end.test_client import ask

FOLDER = Path(__file__).parents[2] / "screenshots"
QUESTIONS = ("What is rain?", "What is the capital of Italy?", "Who was Ada Lovelace?", "What is a harbour?")


@pytest.mark.long
def test_six_pictures(visit: Visit, people: People) -> None:
    FOLDER.mkdir(exist_ok=True)
    for question in QUESTIONS * 2:
        for model in ("pirate", people.demo.access.model):
            ask(people.demo.client(), model, question, max_tokens=16)
    visit("admin").open("/console/usage").wait_for_timeout(6000)
    save(visit("admin").open("/console"), "overview")
    save(visit("admin", width=360, scheme="dark").open("/console"), "overview-narrow")
    save(visit("admin", scheme="dark").open("/console/adapters/pirate"), "adapter")
    save(visit("admin").open("/console/usage"), "usage")
    save(visit("operator").open("/operator/console/engine"), "engine")
    page = visit("admin", scheme="dark").open("/console/playground")
    page.locator("#say").fill("What is the capital of Italy?")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("article.msg [data-slot=cost]").first).to_contain_text("$", timeout=60_000)
    save(page, "playground")


def save(page: Page, name: str) -> None:
    page.wait_for_load_state("networkidle")
    page.screenshot(path=FOLDER / f"{name}.png")
