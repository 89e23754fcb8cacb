"""The pages of adapters: roles, other tenants, escaping, splits, rollback, states of versions, deletion, what moved meanwhile."""

import base64
from typing import Any
from uuid import UUID

import msgspec
import pytest
from tests.platform.web.browser import Browser, Console, Page, SignedIn
from tests.platform.web.gateway import namespace_of
from tests.tenants.registry_records import AliasWriter, RegistryWriter, digest, unit

from loraplex.engine.errors import EngineUnavailable
from loraplex.engine.messages import EngineStats
from loraplex.platform.inference.decisions.wording import FORMAT
from loraplex.platform.web.console.cookies import TOAST_COOKIE, Toast, Undo
from loraplex.tenants.administration.calibrations import calibrate
from loraplex.tenants.audit_queries import audit_entries

HOSTILE = "<script>alert(1)</script>{{ 7 * 7 }}\"'"
PIRATE = "/console/adapters/pirate"
HTMX = {"hx-request": "true"}


def check(name: str, passed: bool = True, **more: Any) -> dict[str, Any]:
    return {"name": name, "passed": passed, "detail": f"about {HOSTILE}", **more}


async def add(
    console: Console,
    tenant_id: UUID | None,
    *states: str,
    name: str = "pirate",
    report: dict[str, Any] | None = None,
    **moves: dict[int, int],
) -> None:
    """An adapter with a version in each state, and aliases."""
    assert tenant_id is not None
    async with console.database.as_tenant(tenant_id) as session:
        registry = RegistryWriter(session, tenant_id)
        adapter = await registry.get_or_create(name)
        adapter.description = HOSTILE
        for number, state in enumerate(states, 1):
            await registry.add_version(
                name,
                digest=digest(number),
                size_bytes=937_000,
                rank=8,
                config={"r": 8, "lora_alpha": 16 * number, "peft_type": HOSTILE},
                report=report or {"checks": [check("files"), check("base_copies", warning=True)]},
                state=state,
            )
        for alias, targets in moves.items():
            await AliasWriter(session, tenant_id).set(name, alias, targets)


async def add_calibration(console: Console, tenant_id: UUID | None, version: int) -> str:
    """The SHA-256 of a calibration of `pirate`'s version, whose scores were not measured."""
    assert tenant_id is not None
    before, after = ({"accuracy": 0.8, "brier": 0.3, "ece": ece} for ece in (0.2, 0.05))
    measured = {"examples": 120, "before": before, "after": after}
    async with console.database.as_tenant(tenant_id) as session:
        written = await calibrate(
            *(unit(session, tenant_id), tenant_id, "pirate", version),
            system_fingerprint=console.engine.info().system_fingerprint or "",
            format=FORMAT,
            temperatures={"score": 0.9, "choice": 2.5, "predicate": 1.75},
            report=dict.fromkeys(("choice", "predicate"), measured),
        )
        return written.sha256


async def targets(console: Console, browser: Browser, alias: str = "production") -> dict[int, int]:
    tenant_id = browser.session.tenant_id
    assert tenant_id is not None
    async with console.database.as_tenant(tenant_id) as session:
        return dict((await AliasWriter(session, tenant_id).get("pirate", alias)).targets)


async def actions(console: Console) -> list[str]:
    """What was done, oldest first, besides signing in."""
    async with console.database.as_operator() as session:
        found = reversed(await audit_entries(session, None, {}, None, 100))
        return [entry.action for entry in found if not entry.action.startswith("session.")]


QUESTIONS = (
    *("/edit", "/delete", "/aliases/new", "/aliases/production/move", "/aliases/production/rollback"),
    *("/aliases/production/delete", "/aliases/production/split", "/versions/1/delete"),
    *("/aliases/production/gate", "/versions/1/evaluate"),
)


async def test_pages_of_adapters_need_their_scopes(console: Console, signed_in: SignedIn) -> None:
    admin = await signed_in()
    await add(console, admin.session.tenant_id, "ready", "ready", production={1: 90, 2: 10})
    reads = ("", "/pirate", "/pirate/versions/1/report")
    for role, may_read, may_write in (
        *(("admin", True, True), ("developer", True, True)),
        *(("viewer", True, False), ("billing", False, False)),
    ):
        browser = await signed_in(role)
        for path in reads:
            found = (await browser.get(f"/console/adapters{path}")).status_code
            assert found == (200 if may_read else 403), (role, path)
        for path in ("/new", *(f"/pirate{each}" for each in QUESTIONS)):
            found = (await browser.get(f"/console/adapters{path}")).status_code
            assert found == (200 if may_write else 403), (role, path)
    for path, tab in (
        (PIRATE, "Versions"),
        (f"{PIRATE}/evaluations", "Evaluations"),
        ("/console/usage?adapter=pirate", "Usage"),
        ("/console/limits/adapters/pirate", "Limits"),
        ("/console/requests?adapter=pirate", "Requests"),
        ("/console/audit?target=adapters/pirate", "Audit"),
    ):
        page = await admin.page(path)
        assert page.texts(".tabs a") == ["Versions", "Evaluations", "Usage", "Limits", "Requests", "Audit"]
        assert page.texts(".tabs [aria-current]") == [tab]
    assert not (await admin.page("/console/usage")).all(".tabs")
    viewer = await (await signed_in("viewer")).page(PIRATE)
    assert viewer.texts(".tabs a") == ["Versions", "Evaluations", "Usage", "Requests"]
    assert viewer.find("button[aria-disabled=true]").text().strip() == "Upload version"
    assert "Needs the scope adapters:write, which your role has not." in viewer.text
    assert not viewer.all("main form[method=post] button[type=submit]") and not viewer.all(".menu")
    foreign = await signed_in(tenant="other")
    for path in ("", *QUESTIONS, "/versions/1/report"):
        assert (await foreign.get(f"{PIRATE}{path}")).status_code == 404
    assert "No adapters yet" in (await foreign.page("/console/adapters")).text


async def test_nothing_that_a_tenant_writes_becomes_markup(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in()
    failed = {"checks": [check("files"), check("shapes", False)]}
    await add(console, browser.session.tenant_id, "rejected", "ready", report=failed)
    for path in ("/console/adapters", PIRATE, f"{PIRATE}?version=1", f"{PIRATE}/edit"):
        response = await browser.get(path)
        assert "<script>alert" not in response.text and "49" not in Page(response).find("main").text(), path
        assert "alert(1)" in response.text or path == f"{PIRATE}?version=1"


async def test_the_list_says_what_serves_and_where(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in()
    tenant_id = browser.session.tenant_id
    assert tenant_id is not None
    await add(console, tenant_id, "ready", "rejected", production={1: 100})
    await add(console, tenant_id, name="empty")
    stats = EngineStats(device_adapters=[(namespace_of(tenant_id), digest(1))])
    console.engine.script = msgspec.structs.replace(console.engine.script, stats=stats)
    page = await browser.page("/console/adapters")
    assert [text.split("<")[0].strip() for text in page.texts("tbody th a")] == ["empty", "pirate"]
    row = page.texts("tbody tr")[1].replace("\xa0", " ")
    assert "v2 rejected" in row and "device" in row and "937 kB" in row
    assert "2 of 10,000" in page.text
    assert (await browser.page("/console/adapters?search=pir")).texts("tbody th a") == ["pirate"]
    nothing = await browser.page("/console/adapters?state=quarantined")
    assert "No adapter matches the filter." in nothing.text


async def test_the_list_continues_behind_its_fiftieth_adapter(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in()
    for number in range(51):
        await add(console, browser.session.tenant_id, name=f"line-{number:02}")
    page = await browser.page("/console/adapters?search=line")
    assert len(page.all("tbody tr")) == 50 and page.texts("nav[aria-label=Pages] a") == ["Older"]
    rest = await browser.page(str(page.find("nav[aria-label=Pages] a").attributes["href"]))
    assert rest.texts("tbody th a") == ["line-50"]
    newer = rest.find("nav[aria-label=Pages] a").attributes
    assert newer["href"] == "/console/adapters?search=line"
    assert (await browser.get("/console/adapters?after=line-10")).status_code == 400


async def test_residency_says_what_the_first_request_waits(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in()
    tenant_id = browser.session.tenant_id
    assert tenant_id is not None
    await add(console, tenant_id, "ready", "ready", "quarantined", production={1: 100})
    mine, other = namespace_of(tenant_id), b"another tenant"
    stats = EngineStats(
        device_adapters=[(mine, digest(1)), (other, digest(2))],
        quarantined_adapters=[(mine, digest(3))],
        adapter_read_rate=937_000.0,
        adapter_copy_rate=9_370_000.0,
    )
    console.engine.script = msgspec.structs.replace(console.engine.script, stats=stats)
    page = await browser.page(PIRATE)
    tiers = [text.replace("\xa0", " ") for text in page.texts(".tiers li")]
    assert tiers == [
        "v2 disk · not used in 24 hours, first token +1.10 s",
        "v1 device · not used in 24 hours",
    ]
    assert "Now engine 0 refuses it." in page.text
    assert "from openai import OpenAI" in page.find("#use-it-python").text()
    assert page.texts("#of-2 a")[:3] == ["Report", "Compare with…", "Evaluate…"]
    assert "Move production here…" in page.texts("#of-2 a")
    assert "Move production here…" not in page.texts("#of-1 a")
    report = await browser.get(f"{PIRATE}/versions/3/report")
    assert "Now engine 0 refuses it." in " ".join(Page(report).tree.text().split())


async def test_an_adapter_is_created_and_then_uploaded_to(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in("developer")
    action = "/console/adapters/new"
    wrong = await browser.submit(action, action, {"name": "Not a name", "description": HOSTILE})
    page = Page(wrong)
    assert wrong.status_code == 422 and "is not allowed" in page.find("#name-e").text()
    assert page.form(action)["description"] == HOSTILE
    sent = page.form(action) | {"name": "support"}
    made = [await browser.post(action, sent) for _ in range(2)]
    assert [each.headers["location"] for each in made] == ["/console/adapters/support/upload"] * 2
    taken = await browser.submit(action, action, {"name": "support"})
    assert taken.status_code == 422 and "exists already" in taken.text
    assert await actions(console) == ["adapter.create"]


async def test_the_calibration_of_a_version_is_shown(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in()
    await add(console, browser.session.tenant_id, "ready", "ready")
    sha256 = await add_calibration(console, browser.session.tenant_id, 1)
    page = await browser.page(f"{PIRATE}?version=1")
    assert page.texts("#calibration tbody th") == ["predicate", "choice", "score"]
    measured = ["120", "0.800 → 0.800", "0.300 → 0.300", "0.200 → 0.050"]
    assert page.texts("#calibration td") == ["1.750", *measured, "2.500", *measured, "0.900", *"––––"]
    assert f"x-loraplex-decision-calibration is {sha256[:16]}" in page.texts("#calibration .help")[0]
    ask = page.find("#calibration a.btn").attributes["href"]
    assert ask == "/console/playground/decision?model=pirate%401"
    other = await browser.page(f"{PIRATE}?version=2")
    assert sha256[:16] not in other.text and "Not calibrated" in other.find("#calibration").text()
    command = other.find("#calibration button.copy").attributes["data-copy"] or ""
    assert command.startswith("loraplex decision calibrate --adapter pirate@2 ")


async def test_a_split_is_moved_by_its_range(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in()
    await add(console, browser.session.tenant_id, "ready", "ready", production={1: 90, 2: 10})
    action = f"{PIRATE}/aliases/production/move"
    page = await browser.page(PIRATE)
    form = page.form(action)
    assert (form["first"], form["older"], form["newer"]) == ("90", "1", "2")
    draft = await browser.get(f"{PIRATE}/aliases/production/split?first=70&generation=1", **HTMX)
    assert "Save 70 and 30 %" in draft.text and "<html" not in draft.text
    done = await browser.post(action, {**Page(draft).form(action), "csrf": form["csrf"]})
    assert (done.status_code, done.headers["location"]) == (303, PIRATE)
    assert await targets(console, browser) == {1: 70, 2: 30}
    shown = await browser.page(PIRATE)
    toast = "pirate:production leads to v1 for 70 %, v2 for 30 % of its requests."
    assert shown.find(".toast p").text() == toast
    assert not (await browser.page(PIRATE)).all(".toast")
    # The form of before the move is refused, and says who moved it to what.
    late = await browser.post(action, {**form, "first": "0", "idempotency_key": "another"})
    assert late.status_code == 422
    assert f"The alias was moved by {browser.session.email} while you looked" in late.text
    assert "leads to v1 for 70 %, v2 for 30 % of its requests. Nothing was changed." in late.text
    assert Page(late).find(".note.bad a").attributes["href"] == PIRATE
    assert await targets(console, browser) == {1: 70, 2: 30}
    assert await actions(console) == ["alias.move"]


async def test_a_move_is_undone_in_its_toast(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in()
    await add(console, browser.session.tenant_id, "ready", "ready", production={1: 90, 2: 10})
    base = f"{PIRATE}/aliases/production"
    await browser.submit(PIRATE, f"{base}/move", {"first": "0"})
    toast = await browser.page(PIRATE)
    assert toast.find(f'.toast form[action="{base}/rollback"] button').text() == "Undo"
    undo = toast.form(f"{base}/rollback")
    for _ in range(2):
        done = await browser.post(f"{base}/rollback", undo)
        assert done.status_code == 303 and await targets(console, browser) == {1: 90, 2: 10}
    late = await browser.post(f"{base}/rollback", {**undo, "idempotency_key": "another"})
    assert late.status_code == 422 and "The alias was moved by" in late.text
    # An alias that was just made has nothing to go back to.
    await browser.submit(f"{base}/delete", f"{base}/delete")
    await browser.submit(f"{PIRATE}/aliases/new", f"{PIRATE}/aliases/new")
    assert not (await browser.page(PIRATE)).all(".toast form")
    assert await actions(console) == ["alias.move", "alias.rollback", "alias.delete", "alias.create"]


@pytest.mark.parametrize(
    "adapter", ["../keys/abc", "..", "pirate/../../team", "https://elsewhere.example", ""]
)
async def test_a_forged_toast_names_no_other_action(
    console: Console, signed_in: SignedIn, adapter: str
) -> None:
    browser = await signed_in()
    for name, undo in (("own", Undo("pirate", "production", 1)), ("forged", Undo(adapter, "production", 1))):
        value = base64.urlsafe_b64encode(msgspec.json.encode(Toast(name, undo))).rstrip(b"=").decode()
        browser.http.cookies.set(TOAST_COOKIE, value)
        forms = (await browser.page("/console/adapters")).all(".toast form")
        assert [each.attributes["action"] for each in forms] == (
            [f"{PIRATE}/aliases/production/rollback"] if name == "own" else []
        )


async def test_a_split_of_three_has_fields_that_sum_to_100(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in()
    await add(console, browser.session.tenant_id, *["ready"] * 3, production={1: 20, 2: 30, 3: 50})
    base = f"{PIRATE}/aliases/production"
    page = await browser.page(PIRATE)
    form = page.form(f"{base}/move")
    assert [form[f"share-{version}"] for version in (1, 2, 3)] == ["20", "30", "50"]
    save = f'form[action="{base}/move"] button.primary'
    assert page.find(save).attributes["aria-disabled"] == "true" and "Nothing is changed." in page.text
    draft = f"{base}/split?generation=1&share-1=20&share-2=20&share-3="
    short = Page(await browser.get(f"{draft}50", **HTMX))
    assert "The shares sum to 90, not to 100." in short.tree.text()
    named = Page(await browser.get(f"{draft}60", **HTMX))
    assert named.find(save).text() == "Save 20, 20 and 60 %"
    await browser.post(f"{base}/move", {**named.form(f"{base}/move"), "csrf": form["csrf"]})
    assert await targets(console, browser) == {1: 20, 2: 20, 3: 60}


async def test_an_alias_is_made_moved_and_rolled_back_without_a_script(
    console: Console, signed_in: SignedIn
) -> None:
    browser = await signed_in()
    await add(console, browser.session.tenant_id, "ready", "ready", "ready", "rejected")
    new, base = f"{PIRATE}/aliases/new", f"{PIRATE}/aliases/production"
    page = await browser.page(new)
    assert page.form(new)["alias"] == "production" and page.form(new)["share-3"] == "100"
    wrong = await browser.submit(new, new, {"share-1": "50"})
    assert wrong.status_code == 422 and "The shares sum to 150, not to 100." in wrong.text
    assert Page(wrong).form(new)["share-1"] == "50"
    for shares in ({"share-3": "x"}, {"share-3": "", "share-x": "100"}, {"share-3": "", "share-9": "100"}):
        assert (await browser.submit(new, new, shares)).status_code in (404, 422)
    await browser.submit(new, new, {"share-1": "20", "share-2": "30", "share-3": "50"})
    assert await targets(console, browser) == {1: 20, 2: 30, 3: 50}
    asked = await browser.page(f"{base}/move?version=2")
    assert asked.form(f"{base}/move")["share-2"] == "100"
    await browser.submit(f"{base}/move?version=2", f"{base}/move")
    assert await targets(console, browser) == {2: 100}
    dialog = await browser.get(f"{base}/rollback", **HTMX)
    assert dialog.text.lstrip().startswith("<dialog") and "v1 20 %" in dialog.text.replace("\xa0", " ")
    back = await browser.submit(f"{base}/rollback", f"{base}/rollback")
    assert back.status_code == 303 and await targets(console, browser) == {1: 20, 2: 30, 3: 50}
    log = await browser.page("/console/audit?target=adapters/pirate")
    assert log.texts("tbody td:nth-of-type(2)") == ["alias.rollback", "alias.move", "alias.create"]
    assert log.texts(".tabs [aria-current]") == ["Audit"]
    assert not (await browser.page("/console/audit?target=adapters/p_rate")).all("tbody tr")
    gone = await browser.submit(f"{base}/delete", f"{base}/delete")
    assert gone.status_code == 303 and "No alias yet" in (await browser.page(PIRATE)).text
    assert await actions(console) == ["alias.create", "alias.move", "alias.rollback", "alias.delete"]


async def test_a_version_is_deprecated_restored_and_deleted(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in()
    await add(console, browser.session.tenant_id, "ready", "ready", production={2: 100})
    first = f"{PIRATE}/versions/1"
    page = await browser.page(PIRATE)
    assert not page.all(f'form[action="{PIRATE}/versions/2/deprecate"]')
    await browser.submit(PIRATE, f"{first}/deprecate")
    shown = await browser.page(PIRATE)
    assert "pirate@1 is deprecated" in shown.find(".toast").text() and "deprecated" in shown.text
    stale = await browser.post(f"{first}/restore", page.form(f"{first}/deprecate") | {"idempotency_key": "k"})
    assert stale.status_code == 412
    await browser.submit(PIRATE, f"{first}/restore")
    aliased = await browser.page(f"{PIRATE}/versions/2/delete")
    assert "while aliases lead to it: production" in aliased.text
    assert "disabled" in aliased.find("button.danger").attributes
    done = await browser.submit(f"{first}/delete", f"{first}/delete")
    assert done.status_code == 303 and "deleting" in (await browser.page(PIRATE)).text
    assert await actions(console) == ["version.deprecate", "version.restore", "version.delete"]


async def test_deleting_an_adapter_needs_its_name_typed(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in()
    await add(console, browser.session.tenant_id, "ready", production={1: 100})
    action = f"{PIRATE}/delete"
    refused = await browser.submit(action, action, {"typed": "pirate"})
    assert refused.status_code == 422 and "delete them first" in refused.text
    assert "It cannot be deleted while it has aliases: production" in (await browser.page(action)).text
    await browser.submit(f"{PIRATE}/aliases/production/delete", f"{PIRATE}/aliases/production/delete")
    mistyped = await browser.submit(action, action, {"typed": "pirat"})
    assert mistyped.status_code == 422 and Page(mistyped).find("#typed-e").text().strip() == "Type pirate."
    done = await browser.submit(action, action, {"typed": "pirate"})
    assert (done.status_code, done.headers["location"]) == (303, "/console/adapters")
    assert (await browser.get(PIRATE)).status_code == 404


async def test_a_report_asks_for_itself_until_it_is_whole(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in()
    failed = {"checks": [check("files"), check("shapes", False)]}
    await add(console, browser.session.tenant_id, "validating", "rejected", "ready", report=failed)
    running = Page(await browser.get(f"{PIRATE}/versions/1/report"))
    assert running.find("#report").attributes["hx-trigger"] == "load delay:2s"
    assert len(running.all(".checks li")) == 13
    rejected = Page(await browser.get(f"{PIRATE}/versions/2/report"))
    assert "hx-trigger" not in rejected.find("#report").attributes
    assert rejected.texts(".checks li.bad .mono") == ["shapes"] and "How to mend it." in rejected.tree.text()
    assert "trained on a base model of another size" in rejected.tree.text()
    ready = Page(await browser.get(f"{PIRATE}/versions/3/report"))
    assert "Move production here" in ready.tree.text()
    diff = await browser.page(f"{PIRATE}?version=3&compare=1")
    assert diff.texts(".diff del") == ['"lora_alpha": 16,'] and diff.texts(".diff ins") == [
        '"lora_alpha": 48,'
    ]
    mistyped = await browser.get("/console/adapters/pirat")
    assert (
        mistyped.status_code == 404
        and Page(mistyped).find(f'main a[href="{PIRATE}"]').text() == "Open pirate"
    )
    high = 2**31
    beyond = (
        f"?version={high}",
        f"?compare={high}",
        f"?before={high}",
        "?before=-1",
        f"/versions/{high}/report",
    )
    for wrong in ("?version=9", "?compare=9", "/versions/9/report", *beyond):
        assert (await browser.get(f"{PIRATE}{wrong}")).status_code == 404
    assert (await browser.get(f"{PIRATE}?version=x")).status_code == 404


async def test_a_description_that_changed_meanwhile_is_not_overwritten(
    console: Console, signed_in: SignedIn
) -> None:
    browser = await signed_in()
    await add(console, browser.session.tenant_id)
    action = f"{PIRATE}/edit"
    forms = [(await browser.page(action)).form(action) for _ in range(2)]
    assert (await browser.post(action, {**forms[0], "description": "one"})).status_code == 303
    refused = await browser.post(action, {**forms[1], "description": "two"})
    assert refused.status_code == 422 and Page(refused).form(action)["description"] == "two"
    assert "one" in (await browser.page(PIRATE)).text


@pytest.mark.parametrize("path", [PIRATE, "/console/adapters"])
async def test_without_an_engine_the_pages_say_so(
    console: Console, signed_in: SignedIn, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async def away() -> EngineStats:
        raise EngineUnavailable("away")

    monkeypatch.setattr(console.engine, "stats", away)
    browser = await signed_in()
    await add(console, browser.session.tenant_id, "ready", production={1: 100})
    assert "No engine answers" in (await browser.page(path)).text
