"""Evaluations, suites and gates in the console: from an empty page to a release past a gate, and who may do what."""

import asyncio
import json
import re
from typing import Any
from uuid import UUID

import pytest
from playwright.async_api import FilePayload
from sqlalchemy import text, update
from tests.platform.web.adapters.test_pages import PIRATE, actions, add, targets
from tests.platform.web.browser import Browser, Console, Page, SignedIn
from tests.platform.web.console.chromium import accessible_in_all_looks, watched_page
from tests.platform.web.evaluations.stored_evaluation import add_evaluation, add_gate, stored_report

from loraplex.tenants.actors import system_actor
from loraplex.tenants.administration.canaries import revert
from loraplex.tenants.canaries.guards import GuardRepository
from loraplex.tenants.canaries.records import GuardCounts
from loraplex.tenants.models import AliasGuard
from loraplex.tenants.unit_of_work import unit_of_work

SUITES = "/console/suites"
MOVE = f"{PIRATE}/aliases/production/move"
GATE = f"{PIRATE}/aliases/production/gate"
EVALUATE = f"{PIRATE}/versions/2/evaluate"
CASE = {"messages": [{"role": "user", "content": "Where does the ferry leave?"}], "expect": {"regex": "Pier"}}
GUARD = {"guarded": "on", "max_failure_ratio": "2", "max_unsatisfied": "", "min_requests": "100"}


@pytest.fixture
async def admin(console: Console, signed_in: SignedIn) -> Browser:
    """An admin of a tenant with `pirate`, whose version 1 is production; 2 is new."""
    browser = await signed_in()
    await add(console, browser.session.tenant_id, "ready", "ready", production={1: 100})
    return browser


def tenant_of(browser: Browser) -> UUID:
    assert browser.session.tenant_id is not None
    return browser.session.tenant_id


async def test_a_suite_is_pasted_and_deleted(admin: Browser) -> None:
    assert "No suites of your own yet" in (await admin.page(SUITES)).text
    new = f"{SUITES}/new"
    wrong = await admin.submit(new, new, {"name": "ferry", "cases": json.dumps(CASE) + '\n{"messages": 1}'})
    page = Page(wrong)
    assert wrong.status_code == 422 and "Line 2" in page.find(".note.bad").text()
    assert '{"messages": 1}' in page.form(new)["cases"] and page.form(new)["name"] == "ferry"
    assert (await admin.submit(new, new, {"name": "ferry", "cases": json.dumps(CASE)})).status_code == 303
    shown = await admin.page(SUITES)
    assert shown.find(".toast").text() == "Suite ferry is stored. Cases: 1."
    assert shown.texts("tbody th") == ["conformance", "ferry"]
    delete = f"{SUITES}/ferry/delete"
    assert (await admin.submit(delete, delete)).status_code == 303
    assert (await admin.page(SUITES)).texts("tbody th") == ["conformance"]


async def test_an_evaluation_runs_as_the_person(
    console: Console, admin: Browser, signed_in: SignedIn
) -> None:
    assert "No evaluations yet" in (await admin.page(f"{PIRATE}/evaluations")).text
    form = (await admin.page(EVALUATE)).form(EVALUATE)
    assert (form["suite"], form["baseline"], form["seed"]) == ("conformance", "production", "0")
    wrong = await admin.submit(EVALUATE, EVALUATE, {"seed": "-1", "baseline": "@2"})
    assert wrong.status_code == 422 and "too little" in Page(wrong).find("#seed-e").text()
    itself = await admin.submit(EVALUATE, EVALUATE, {"baseline": "@2"})
    assert "is the version itself" in Page(itself).find("#baseline-e").text()
    await admin.submit(f"{SUITES}/new", f"{SUITES}/new", {"name": "ferry", "cases": json.dumps(CASE)})
    begun = await admin.submit(EVALUATE, EVALUATE, {"suite": "ferry", "baseline": "@1", "seed": "7"})
    assert begun.status_code == 303, begun.text
    path = begun.headers["location"]
    page = await admin.page(path)
    assert page.find("#evaluation").attributes["hx-trigger"] == "load delay:2s"
    assert "against pirate@1" in page.text and "0 of " in page.text
    async with console.database.as_operator() as session:
        keys = "SELECT name, scopes, created_by, expires_at - now() > interval '23 hours' FROM api_keys"
        [key] = (await session.execute(text(f"{keys} WHERE kind = 'console'"))).all()
    assert tuple(key) == ("evaluation", ["inference"], admin.session.email, True)
    viewer = await signed_in("viewer")
    assert not (await viewer.page(path)).all("main form") and (await viewer.get(EVALUATE)).status_code == 403
    running = asyncio.create_task(console.app.state.evaluations.run())
    async with asyncio.timeout(60):
        while (page := await admin.page(path)).all("progress"):
            await asyncio.sleep(0.1)
    running.cancel()
    assert page.texts("tbody th") == ["pirate@2", "pirate@1"], page.text
    other = await admin.submit(EVALUATE, EVALUATE)
    path = other.headers["location"]
    assert (await admin.submit(path, f"{path}/cancel")).status_code == 303
    ended = await admin.page(path)
    assert "It was cancelled" in ended.text and "hx-trigger" not in ended.find("#evaluation").attributes
    assert (await admin.get(path.replace("pirate", "other"))).status_code == 404
    assert await actions(console) == [
        *("suite.create", "evaluation.start", "evaluation.start", "evaluation.cancel")
    ]


async def test_a_report_shows_both_answers_and_many_cases(console: Console, admin: Browser) -> None:
    report = stored_report(60, "Ahoy " * 200)
    columns: dict[str, Any] = {
        "version": 2,
        "baseline": "pirate@1",
        "total": 120,
        "pass_rate": 0.0,
        "baseline_pass_rate": 1.0,
    }
    found = await add_evaluation(console.database, tenant_of(admin), "pirate", report, **columns)
    path = f"{PIRATE}/evaluations/{found}"
    page = await admin.page(path)
    assert "Only pirate@1 passes 60 cases, only pirate@2 passes 0: p = 0.125" in page.text
    cells = [text.replace("\xa0", " ") for text in page.texts("tbody td")]
    assert cells[:4] == ["0 of 60", "0.0 %", "0.0 to 6.0 %", "1,200"] and "200 ms" in cells
    assert len(page.all("article")) == 50 and page.texts("article h3")[0] == "case-0 worse"
    assert page.find("article").css_first("details summary").text() == "1,000 characters"  # type: ignore[union-attr]
    rest = await admin.page(
        str(page.find("nav[aria-label='Pages of cases'] a").attributes["href"]).split("#")[0]
    )
    assert len(rest.all("article")) == 10 and rest.texts("nav[aria-label='Pages of cases'] a") == [
        "Earlier cases"
    ]
    document = await admin.get(f"{path}/report")
    assert (
        document.json()["comparison"]["worse"] == 60
        and "attachment" in document.headers["content-disposition"]
    )
    listed = await admin.page(f"{PIRATE}?version=2")
    assert "Evaluations of v2" in listed.text and "0.0 to 6.0" in listed.text
    async with console.database.as_operator() as session:
        ended = "state = 'failed', reason = 'its key ended', report = NULL, report_sha256 = NULL, pass_rate = NULL"
        await session.execute(text(f"UPDATE evaluations SET {ended}"))
    assert "It ended after 1 of 120 answers: its key ended." in (await admin.page(path)).text


async def test_a_gate_refuses_a_release_until_an_admin_gives_a_reason(
    console: Console, admin: Browser, signed_in: SignedIn
) -> None:
    columns: dict[str, Any] = {
        "version": 2,
        "pass_rate": 0.5,
        "suite": "ferry",
        "system_fingerprint": fingerprint(console),
    }
    found = await add_evaluation(console.database, tenant_of(admin), "pirate", **columns)
    wrong = await admin.submit(GATE, GATE, {"min_pass": "2"})
    assert wrong.status_code == 422 and "too much" in Page(wrong).find("#min_pass-e").text()
    done = await admin.submit(GATE, GATE, {"suite": "ferry", "min_pass": "0.9", "max_regression": ""})
    assert done.status_code == 303, done.text
    assert "a pass rate of at least 90.0" in (await admin.page(PIRATE)).text
    report = await admin.page(f"{PIRATE}/evaluations/{found}")
    said = "Gate of pirate:production: not kept (50.0 %, needs 90.0 %). Move it to v2…"
    assert said in " ".join(report.text.split())
    # Forms begin with what the gate needs, and a refusal without a report leads to the one that makes it.
    form = (await admin.page(EVALUATE)).form(EVALUATE)
    assert (form["suite"], form["baseline"]) == ("ferry", "production")
    beside = f"{PIRATE}/aliases/beside/gate"
    await admin.submit(
        f"{PIRATE}/aliases/new", f"{PIRATE}/aliases/new", {"alias": "beside", "share-1": "100", "share-2": ""}
    )
    assert (await admin.page(beside)).form(beside)["suite"] == "ferry"
    await admin.submit(beside, beside, {"min_pass": "0.9", "max_regression": "0.1"})
    refused = await admin.submit(
        f"{PIRATE}/aliases/beside/move", f"{PIRATE}/aliases/beside/move", {"share-1": "", "share-2": "100"}
    )
    assert Page(refused).find(".note.bad a").attributes["href"] == f"{EVALUATE}?suite=ferry&baseline=beside"
    form = (await admin.page(f"{EVALUATE}?suite=ferry&baseline=beside")).form(EVALUATE)
    assert (form["suite"], form["baseline"]) == ("ferry", "beside")
    needed = await admin.submit(f"{SUITES}/ferry/delete", f"{SUITES}/ferry/delete")
    assert re.search("the gate of pirate:(production|beside) needs suite ferry", needed.text, re.IGNORECASE)
    split = {"share-1": "95", "share-2": "5", **GUARD}
    for role, may in (("developer", False), ("admin", True)):
        browser = await signed_in(role)
        refused = await browser.submit(MOVE, MOVE, split)
        page = Page(refused)
        assert (
            refused.status_code == 422 and "the gate of production needs 0.9" in page.find(".note.bad").text()
        )
        assert page.find(".note.bad a").attributes["href"] == f"{PIRATE}/evaluations/{found}"
        assert ("reason" in page.form(MOVE)) is may and page.form(MOVE)["share-2"] == "5"
        assert ("takes the scope tenant:admin" in page.text) is not may
    past = await browser.post(MOVE, {**page.form(MOVE), "reason": "the harbor moved"})
    assert past.status_code == 303 and await targets(console, admin) == {1: 95, 2: 5}
    remove = f"{GATE}/delete"
    assert (await admin.submit(remove, remove)).status_code == 303
    assert await actions(console) == [
        *("alias.gate", "alias.create", "alias.gate", "alias.gate.override", "alias.move"),
        "alias.gate.delete",
    ]


def fingerprint(console: Console) -> str | None:
    return console.engine.info().system_fingerprint


async def count_canary(console: Console, browser: Browser, **counts: int) -> None:
    """Let the guard of production have these counts, and go back if they say so."""
    tenant_id = tenant_of(browser)
    async with console.database.as_operator() as session:
        await session.execute(update(AliasGuard).values(counts=GuardCounts(**counts).model_dump()))
        [place] = await GuardRepository(session).due()
    async with unit_of_work(console.database, system_actor("canaries"), None, None) as uow:
        await revert(uow, place)
    assert place.tenant_id == tenant_id


async def test_a_canary_shows_how_near_it_is_and_that_it_went_back(console: Console, admin: Browser) -> None:
    none = await admin.submit(
        MOVE, MOVE, {"share-1": "90", "share-2": "10", **GUARD, "max_failure_ratio": "0"}
    )
    assert none.status_code == 422 and "too little" in Page(none).find("#max_failure_ratio-e").text()
    assert (await admin.submit(MOVE, MOVE, {"share-1": "90", "share-2": "10", **GUARD})).status_code == 303
    await count_canary(console, admin, canary_requests=50, canary_answered=40, canary_failed=10)
    page = await admin.page(PIRATE)
    assert "once v2 has 100 requests: it has 50" in page.text and "20.0" in page.text
    assert "at most 2 × v1" in page.text
    # All to one version leaves the guard behind, in a form that offers none and in one that still has it.
    for version in (1, 2):
        assert f"Send all to v{version}" in page.text
        assert "guarded" not in (await admin.page(f"{MOVE}?version={version}")).form(MOVE)
    assert (await admin.submit(PIRATE, MOVE, {"first": "100"})).status_code == 303
    assert await targets(console, admin) == {1: 100}
    assert (await admin.submit(MOVE, MOVE, {"share-1": "90", "share-2": "10", **GUARD})).status_code == 303
    # Another share keeps the guard.
    assert (await admin.submit(PIRATE, MOVE, {"first": "80"})).status_code == 303
    await count_canary(console, admin, canary_requests=200, canary_failed=80, canary_answered=120)
    assert await targets(console, admin) == {1: 100}
    gone = (await admin.page(PIRATE)).text.replace("\xa0", " ")
    assert "It went back by itself" in gone and "from v1 80 %, v2 20 %: 80 of 200 requests failed" in gone
    assert (await admin.submit(MOVE, MOVE, {"share-1": "", "share-2": "100"})).status_code == 303
    assert "It went back by itself" not in (await admin.page(PIRATE)).text


def file(content: bytes) -> FilePayload:
    return {"name": "ferry.jsonl", "mimeType": "application/jsonl", "buffer": content}


@pytest.mark.long
async def test_pages_of_evaluations_in_a_browser(console: Console, admin: Browser) -> None:
    """Empty and full, in all looks; a suite that is chosen as a file, and an evaluation that ends while it is looked at."""
    name = "a-suite-with-a-name-of-sixty-three-characters-that-does-not-wrap"[:63]
    async with watched_page(console, admin) as page:
        for path in (SUITES, f"{PIRATE}/evaluations", f"{SUITES}/new"):
            await page.goto(path)
            await accessible_in_all_looks(page)
        await page.get_by_label("Name").fill(name)
        lines = "\n".join(json.dumps(CASE) for _ in range(300)).encode()
        await page.get_by_label("File in place").set_input_files(file(lines + b"\nno"))
        await page.get_by_role("button", name="Store suite").click()
        await page.get_by_text("Line 301").wait_for()
        await page.get_by_label("File in place").set_input_files(file(lines))
        await page.get_by_role("button", name="Store suite").click()
        await page.get_by_role("rowheader", name=name).wait_for()
        await accessible_in_all_looks(page)
        columns: dict[str, Any] = {
            "version": 2,
            "total": 6,
            "baseline": "pirate@1",
            "pass_rate": 0.0,
            "baseline_pass_rate": 1.0,
        }
        report = stored_report(3, "Ahoy " * 200)
        found = await add_evaluation(console.database, tenant_of(admin), "pirate", report, **columns)
        await admin.submit(MOVE, MOVE, {"share-1": "90", "share-2": "10", **GUARD, "max_ttft_ratio": "1.5"})
        await add_gate(console.database, tenant_of(admin), "pirate")
        for path in (f"{PIRATE}/evaluations/{found}", PIRATE, GATE, EVALUATE, f"{MOVE}?version=2"):
            shown = await page.goto(path)
            assert shown is not None and shown.ok, path
            await accessible_in_all_looks(page)
        bound = page.get_by_label("Failure rate")
        assert await bound.is_disabled()
        await page.get_by_label("Go back by itself").check()
        assert await bound.is_enabled()
        await admin.submit(f"{SUITES}/new", f"{SUITES}/new", {"name": "ferry", "cases": json.dumps(CASE)})
        begun = await admin.submit(EVALUATE, EVALUATE, {"suite": "ferry", "baseline": "@1"})
        await page.goto(begun.headers["location"])
        running = asyncio.create_task(console.app.state.evaluations.run())
        # The page asks for itself until it is there.
        await page.get_by_text("completed", exact=True).wait_for()
        running.cancel()
        await page.get_by_role("link", name="Download report").wait_for()
