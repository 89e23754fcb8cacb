"""The playground's page: models, prices, bounds and roles; the schema check."""

import json

import pytest
from tests.platform.web.browser import Console, Page, SignedIn
from tests.platform.web.playground.test_queries import FOR_ALL, tenant_with_pirate

from loraplex.platform.errors import WorkersUnavailable
from loraplex.platform.web.console_app import ConsoleOptions, add_console
from loraplex.tenants.billing.rate_cards import RateCards

PLAYGROUND = "/console/playground"
SCHEMA = f"{PLAYGROUND}/schema"


async def harbor(console: Console) -> None:
    """The tenant `harbor` with two versions of `pirate`, and a rate card."""
    async with console.database.as_operator() as session:
        await RateCards(session).create_first("USD", FOR_ALL)
    await tenant_with_pirate(console.database, "harbor")


def models_of(page: Page) -> list[str]:
    return [str(each.attributes["value"]) for each in page.all("#models option")]


async def test_the_page_offers_what_the_tenant_may_call(console: Console, signed_in: SignedIn) -> None:
    await harbor(console)
    browser = await signed_in("developer")
    page = await browser.page(PLAYGROUND)
    assert models_of(page)[:4] == ["pirate:canary", "pirate", "pirate@2", "pirate@1"]
    option = page.find("#models option")
    assert (option.attributes["data-prompt"], option.attributes["data-completion"]) == ("100000", "400000")
    root = page.find("#playground").attributes
    assert root["data-currency"] == "USD" and root["data-session"] == str(browser.session.id)
    assert page.find("#p-temperature").attributes["max"] == "2"
    context = console.engine.info().max_model_len
    assert page.find("#p-max_tokens").attributes["max"] == str(context)
    # Every field names the place of its error, and every label its field.
    fields = {str(node.attributes["id"]) for node in page.all(".parameter")}
    assert {str(node.attributes["id"]) for node in page.all("p.error")} >= {
        f"{each}-error" for each in fields
    }
    labelled = {node.attributes.get("for") for node in page.all("main label")}
    assert labelled >= fields | {"model-a", "model-b", "system", "say", "tools", "schema", "choice"}
    for name in ("data-schema", "data-tools"):
        assert json.loads(str(page.find(f"[{name}]").attributes[name]))

    chosen = await browser.page(f"{PLAYGROUND}?model=pirate@1&against=pirate@2")
    given = [node.attributes["value"] for node in chosen.all("input[list=models][data-given]")]
    assert given == ["pirate@1", "pirate@2"]
    unknown = await browser.page(f"{PLAYGROUND}?model=%22%3E%3Cscript%3E")
    assert "<script>" not in unknown.response.text.partition("<main")[2]


async def test_the_demos_first_answers_repeat(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in()
    assert "value" not in (await browser.page(PLAYGROUND)).find("#p-temperature").attributes
    add_console(console.app, console.dependencies, ConsoleOptions(is_demo=True))
    page = await browser.page(PLAYGROUND)
    assert page.find("#p-temperature").attributes["value"] == "0"
    assert "value" not in page.find("#p-top_p").attributes


async def test_a_tenant_without_adapters_has_the_base_model(signed_in: SignedIn) -> None:
    page = await (await signed_in()).page(PLAYGROUND)
    assert len(models_of(page)) == 1 and len(page.all("#starters [data-say]")) == 3


async def test_what_needs_the_script_waits_for_it(console: Console, signed_in: SignedIn) -> None:
    await harbor(console)
    page = await (await signed_in("developer")).page(PLAYGROUND)
    names = ("#compare", "#show-code", "#say", "#send", "#stop", "#clear", "#add-tool", "#starters button")
    assert [name for name in names if page.all(f"{name}:not([disabled])")] == []


@pytest.mark.parametrize("role", ["billing", "viewer"])
async def test_a_role_without_inference_is_refused_by_name(signed_in: SignedIn, role: str) -> None:
    browser = await signed_in(role)
    refused = await browser.get(PLAYGROUND)
    assert refused.status_code == 403 and "inference" in refused.text
    page = await browser.page("/console/account")
    assert PLAYGROUND not in [node.attributes["href"] for node in page.all("nav a")]
    sent = await browser.post(SCHEMA, {"csrf": browser.session.csrf_token, "schema": "{}"})
    assert sent.status_code == 403


async def test_a_schema_is_checked_as_a_request_would_be(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in("developer")
    page = await browser.page(PLAYGROUND)
    token = str(page.find("#playground").attributes["data-csrf"])

    async def checked(schema: str, **fields: str) -> str:
        sent = await browser.post(SCHEMA, {"schema": schema, **fields}, **{"x-csrf-token": token})
        assert sent.status_code == 200
        return " ".join(sent.text.split())

    assert "enforced in full" in await checked('{"type": "object", "properties": {}}')
    unique = '{"type": "array", "uniqueItems": true}'
    assert "<code>uniqueItems</code> at <code>/uniqueItems</code>" in await checked(unique)
    assert "refused" in await checked(unique, strict="true")
    wrong = await checked('{"<b>": 1, "type": "<script>"}')
    assert "refused" in wrong and "/type" in wrong and "<script>" not in wrong
    assert "not JSON" in await checked("{")

    console.dependencies.compile_checks.error = WorkersUnavailable("busy")  # type: ignore[attr-defined]
    away = await browser.post(SCHEMA, {"schema": "{}"}, **{"x-csrf-token": token, "hx-request": "true"})
    assert away.status_code == 503 and "<html" not in away.text


async def test_a_schema_from_another_site_is_not_read(signed_in: SignedIn) -> None:
    browser = await signed_in("developer")
    for headers in ({}, {"x-csrf-token": "of another session"}):
        assert (await browser.post(SCHEMA, {"schema": "{}"}, **headers)).status_code == 403
