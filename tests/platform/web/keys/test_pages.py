"""The pages of keys: who may open them, a secret shown once, rotation, revocation, errors at their field, escaping."""

import re
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import select, text
from tests.platform.web.browser import Browser, Console, Page, SignedIn
from tests.platform.web.console.chromium import accessible, watched_page
from tests.platform.web.limits.test_queries import CountingAdmissions
from tests.platform.web.observed_tenant import observed_tenant
from tests.platform.web.overview.test_pages import counters

from loraplex.platform.web.console import page as page_module
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.audit_queries import audit_entries
from loraplex.tenants.database import Database
from loraplex.tenants.models import ApiKey

NAME = "<img src=x onerror=alert(1)>\"'&"


async def make(console: Console, browser: Browser, name: str = "app", *scopes: str) -> str:
    """A key of the browser's tenant; its public id."""
    async with console.database.as_operator() as session:
        made = await KeyRepository(session).create(
            browser.session.tenant_id, name, scopes or ("inference",), created_by="mira"
        )
        return made.record.key_id


async def actions(console: Console) -> list[tuple[str, str]]:
    """What was done and who did it, oldest first, besides signing in."""
    async with console.database.as_operator() as session:
        found = await audit_entries(session, None, {}, None, 100)
        done = [entry for entry in reversed(found) if not entry.action.startswith("session.")]
        return [(entry.action, entry.actor) for entry in done]


async def test_pages_of_keys_need_keys_write(console: Console, signed_in: SignedIn) -> None:
    admin = await signed_in()
    key_id = await make(console, admin)
    paths = ["", "/new", f"/{key_id}", *(f"/{key_id}/{each}" for each in ("edit", "rotate", "revoke"))]
    for role, status in (("admin", 200), ("developer", 200), ("viewer", 403), ("billing", 403)):
        browser = await signed_in(role)
        for path in paths:
            response = await browser.get(f"/console/keys{path}")
            assert response.status_code == status, (role, path)
            assert status == 200 or "keys:write" in response.text
    foreign = await signed_in(tenant="other")
    for path in paths[2:]:
        assert (await foreign.get(f"/console/keys/{key_id}{path}")).status_code == 404
        assert (await foreign.get(f"/console/keys{path}")).status_code == 404
    forms = await foreign.submit(
        "/console/keys/new", "/console/keys/new", {"name": "x", "scopes": "inference"}
    )
    assert forms.status_code == 200
    page = await foreign.page("/console/keys")
    token = page.find("body").attributes["hx-headers"]
    assert token is not None
    csrf = token.split('"')[3]
    for action in ("rotate", "revoke"):
        refused = await foreign.post(f"/console/keys/{key_id}/{action}", {"csrf": csrf})
        assert refused.status_code == 404
    assert (await admin.page(f"/console/keys/{key_id}")).text.count("working") == 1


async def test_a_tenant_without_keys_learns_what_to_do(signed_in: SignedIn) -> None:
    page = await (await signed_in()).page("/console/keys")
    assert "No keys yet" in page.text and "loraplex key create --tenant harbor" in page.text
    assert page.find('.empty a[href="/console/keys/new"]').text() == "New key"
    empty = await (await signed_in()).page("/console/keys?state=revoked")
    assert "No key is in this state." in empty.text


async def test_a_secret_is_shown_once(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in()
    fields = (await browser.page("/console/keys/new")).form("/console/keys/new")
    assert "scopes" in fields
    sent: dict[str, str | list[str]] = {
        **fields,
        "name": NAME,
        "preset": "custom",
        "scopes": ["inference", "usage:read"],
        "allowed_cidrs": "10.0.0.0/8, ::1/128",
    }
    made = [await browser.post("/console/keys/new", sent) for _ in range(2)]
    page = Page(made[0])
    secret = page.find("#secret").text()
    assert re.fullmatch(r"lpx_live_\w{16}_\w{43}_\w{6}", secret)
    assert made[0].headers["cache-control"] == "no-store"
    assert "required" in page.find('form[action="/console/keys"] input[type=checkbox]').attributes
    # A form that is sent twice makes one key.
    assert Page(made[1]).find("#secret").text() == secret
    assert await actions(console) == [("key.create", browser.session.email)]
    listed = await browser.page("/console/keys")
    assert secret.split("_")[3] not in listed.response.text
    assert listed.texts("tbody th") == [NAME] and "<img" not in listed.response.text
    shown = await browser.page(f"/console/keys/{secret.split('_')[2]}")
    assert shown.find("h1").text() == NAME and "<img" not in shown.response.text
    assert "10.0.0.0/8, ::1/128" in shown.text and f"by {browser.session.email}" in shown.text


async def test_with_a_script_the_secret_comes_as_a_dialog_that_stays_open(signed_in: SignedIn) -> None:
    browser = await signed_in()
    fields = (await browser.page("/console/keys/new")).form("/console/keys/new")
    sent = {**fields, "name": "app", "scopes": "inference"}
    made = await browser.post("/console/keys/new", sent, **{"hx-request": "true"})
    dialog = Page(made).find("dialog")
    assert dialog.attributes["closedby"] == "none" and "data-open" in dialog.attributes
    assert "<html" not in made.text and Page(made).find("#secret").text().startswith("lpx_live_")
    refused = await browser.post("/console/keys/new", {**sent, "name": ""}, **{"hx-request": "true"})
    assert (refused.status_code, refused.headers["hx-retarget"]) == (422, "#main")


@pytest.mark.parametrize(
    ("fields", "name", "message"),
    [
        ({"name": "", "scopes": "inference"}, "name", "Enter a value."),
        ({"name": "app", "scopes": []}, "scopes", "Choose at least one."),
        (
            {"name": "app", "scopes": "inference", "allowed_cidrs": "192.168.1.300/32"},
            "allowed_cidrs",
            "192.168.1.300/32",
        ),
        (
            {"name": "app", "scopes": "inference", "expires_at": "2020-01-01T00:00"},
            "expires_at",
            "must lie in the future",
        ),
    ],
)
async def test_an_error_stands_at_its_field_and_nothing_typed_is_lost(
    console: Console, signed_in: SignedIn, fields: Any, name: str, message: str
) -> None:
    browser = await signed_in()
    form = (await browser.page("/console/keys/new")).form("/console/keys/new")
    sent = {**form, "name": "", "preset": "custom", **fields}
    response = await browser.post("/console/keys/new", sent)
    page = Page(response)
    assert response.status_code == 422 and message in page.find(f"#{name}-e").text()
    assert page.form("/console/keys/new")["name"] == fields["name"]
    assert await actions(console) == []


async def test_a_key_begins_with_limits_within_those_of_the_tenant(
    console: Console, database: Database
) -> None:
    seen = observed_tenant(database.url, tokens_per_day=1000, budget_per_month=30_000_000)
    counters(console, CountingAdmissions())
    browser = await console.signed_in("developer", seen.tenant.name)
    form = await browser.page("/console/keys/new")
    assert "At most 1,000, the tenant's." in form.text and "no such limit" in form.text
    assert not form.all("details[open]")
    sent = {**form.form("/console/keys/new"), "name": "app", "scopes": "inference", "tokens_per_day": "1001"}
    high = await browser.post("/console/keys/new", {**sent, "budget_per_month": "x"})
    assert high.status_code == 422 and "is no amount" in Page(high).find("#budget_per_month-e").text()
    high = await browser.post("/console/keys/new", {**sent, "budget_per_month": "30.01"})
    page = Page(high)
    assert high.status_code == 422 and "at most 1,000" in page.find("#tokens_per_day-e").text()
    assert "at most $30.00" in page.find("#budget_per_month-e").text() and page.all("details[open]")
    assert await actions(console) == []
    for _ in range(2):
        made = await browser.post(
            "/console/keys/new", {**sent, "tokens_per_day": "500", "budget_per_month": "1.5"}
        )
    key_id = Page(made).find("#secret").text().split("_")[2]
    assert [each for each, _ in await actions(console)] == ["key.create", "quotas.change"]
    shown = await browser.page(f"/console/keys/{key_id}")
    assert shown.texts(".quota b") == ["Tokens per day", "Budget per month"]
    assert "250 of 500" in shown.text and "of $1.50" in shown.text
    assert "No request in 30 days." in shown.text and not shown.all("#t-days")
    used = await browser.page(f"/console/keys/{seen.key_id}")
    total = sum(int(cell.attributes["data-v"] or "") for cell in used.all("#t-days td[data-v]"))
    assert len(used.all("#t-days tbody tr")) == 30
    assert total == len(seen.requests) and "No limit of its own." in used.text


async def test_a_preset_says_the_scopes(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in()
    made = await browser.submit("/console/keys/new", "/console/keys/new", {"name": "app", "preset": "reader"})
    key_id = Page(made).find("#secret").text().split("_")[2]
    async with console.database.as_operator() as session:
        key = await KeyRepository(session).get(browser.session.tenant_id, key_id)
    assert key.scopes == ["adapters:read", "usage:read"]
    sent: dict[str, str | list[str]] = {"name": "app", "preset": "reader"}
    sent["scopes"] = ["inference", "usage:read"]
    refused = await browser.submit("/console/keys/new", "/console/keys/new", sent)
    assert refused.status_code == 422 and "Choose Custom for the ticked scopes" in Page(refused).text


async def test_a_role_grants_no_scope_that_it_lacks(console: Console, signed_in: SignedIn) -> None:
    developer = await signed_in("developer")
    page = await developer.page("/console/keys/new")
    disabled = [node.attributes["value"] for node in page.all("input[name=scopes][disabled]")]
    assert disabled == ["billing:read", "tenant:admin"]
    assert page.text.count("your role cannot grant it") == 2
    sent = {**page.form("/console/keys/new"), "name": "app", "preset": "custom", "scopes": "tenant:admin"}
    refused = await developer.post("/console/keys/new", sent)
    assert refused.status_code == 422 and "tenant:admin" in refused.text
    presets = {node.attributes["value"]: "disabled" in node.attributes for node in page.all("[name=preset]")}
    assert [name for name, disabled in presets.items() if disabled] == ["reporting"]
    key_id = await make(console, developer, "root", "tenant:admin")
    shown = await developer.page(f"/console/keys/{key_id}")
    assert len(shown.all("button[aria-disabled=true]")) == 4
    assert "The key has the scope tenant:admin, which your role has not." in shown.text
    sent = (await developer.page(f"/console/keys/{key_id}/revoke")).form(f"/console/keys/{key_id}/revoke")
    assert (await developer.post(f"/console/keys/{key_id}/revoke", sent)).status_code == 422
    assert await actions(console) == []


async def test_a_rotation_keeps_the_old_key_for_a_time(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in()
    key_id = await make(console, browser)
    action = f"/console/keys/{key_id}/rotate"
    made = await browser.submit(action, action, {"grace": "other", "hours": "2"})
    assert made.status_code == 200 and "It replaces" in Page(made).text
    new_id = Page(made).find("#secret").text().split("_")[2]
    old, new = await browser.page(f"/console/keys/{key_id}"), await browser.page(f"/console/keys/{new_id}")
    assert "ends in 1 h" in old.text.replace("\xa0", " ") or "ends in 2 h" in old.text.replace("\xa0", " ")
    assert old.find(f'a[href="/console/keys/{new_id}"]') and not old.all(f'a[href="{action}"]')
    assert new.find(f'a[href="/console/keys/{key_id}/revoke"]').text() == "End it now"
    listed = await browser.page("/console/keys?state=working")
    assert listed.texts("tbody th") == ["app", "app"] and "replaced" in listed.text
    again = await browser.submit(action, action, {"grace": "0"})
    assert again.status_code == 422 and "was rotated already" in again.text
    wrong = await browser.submit(action, action, {"grace": "other", "hours": "721"})
    assert wrong.status_code == 422 and "at most 720" in Page(wrong).find("#hours-e").text()


async def test_a_revocation_says_what_it_ends(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in()
    key_id = await make(console, browser)
    action = f"/console/keys/{key_id}/revoke"
    asked = await browser.page(action)
    assert "It was never used." in asked.text and "refused with 401" in asked.text
    dialog = await browser.get(action, **{"hx-request": "true"})
    assert dialog.text.lstrip().startswith("<dialog") and "data-close" in dialog.text
    done = await browser.submit(action, action)
    assert (done.status_code, done.headers["location"]) == (303, "/console/keys")
    assert "Key app is revoked" in (await browser.page("/console/keys")).find(".toast").text()
    assert (await browser.page("/console/keys?state=revoked")).texts("tbody th") == ["app"]
    assert await actions(console) == [("key.revoke", browser.session.email)]
    assert asked.form(action)["csrf"] and "end_running" not in asked.form(action)
    assert await ended_keys(console) == []


async def test_a_revocation_ends_what_runs_if_it_is_chosen(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in()
    key_id = await make(console, browser)
    action = f"/console/keys/{key_id}/revoke"
    assert (await browser.submit(action, action, {"end_running": "on"})).status_code == 303
    assert await ended_keys(console) == [key_id]


async def ended_keys(console: Console) -> list[str]:
    """The keys whose running requests were ended."""
    async with console.database.as_operator() as session:
        query = select(ApiKey.key_id).where(ApiKey.ended_fence.is_not(None))
        return [*await session.scalars(query)]


async def test_a_change_of_what_moved_meanwhile_is_refused(console: Console, signed_in: SignedIn) -> None:
    browser = await signed_in()
    key_id = await make(console, browser)
    action = f"/console/keys/{key_id}/edit"
    first = (await browser.page(action)).form(action) | {"name": "one", "scopes": "inference"}
    second = (await browser.page(action)).form(action) | {"name": "two", "scopes": "inference"}
    done = await browser.post(action, first)
    assert (done.status_code, done.headers["location"]) == (303, f"/console/keys/{key_id}")
    refused = await browser.post(action, second)
    assert refused.status_code == 422 and "has changed since it was read" in refused.text
    assert Page(refused).form(action)["name"] == "two"
    assert (await browser.page(f"/console/keys/{key_id}")).find("h1").text() == "one"
    forged = await browser.post(action, {**second, "csrf": "x"})
    assert forged.status_code == 403


async def test_long_lists_have_pages(
    console: Console, signed_in: SignedIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "ROWS", 2)
    browser = await signed_in()
    for number in range(3):
        await make(console, browser, f"key {number}")
    first = await browser.page("/console/keys")
    assert first.texts("tbody th") == ["key 2", "key 1"]
    older = first.find('nav[aria-label="Pages"] a').attributes["href"]
    assert older is not None
    last = await browser.page(older)
    assert (
        last.texts("tbody th") == ["key 0"]
        and last.find('nav[aria-label="Pages"] a[href="/console/keys"]').text() == "Newer"
    )


async def test_a_rotation_or_revocation_that_is_sent_twice_runs_once(
    console: Console, signed_in: SignedIn
) -> None:
    browser = await signed_in()
    key_id = await make(console, browser)
    rotate = f"/console/keys/{key_id}/rotate"
    sent = {**(await browser.page(rotate)).form(rotate), "grace": "0"}
    made = [Page(await browser.post(rotate, sent)) for _ in range(2)]
    secret = made[0].find("#secret").text()
    assert made[1].find("#secret").text() == secret and all("It replaces" in each.text for each in made)
    revoke = f"/console/keys/{secret.split('_')[2]}/revoke"
    sent = (await browser.page(revoke)).form(revoke)
    for _ in range(2):
        done = await browser.post(revoke, sent)
        assert (done.status_code, done.headers["location"]) == (303, "/console/keys")
        assert "Key app is revoked" in (await browser.page("/console/keys")).find(".toast").text()
    assert [action for action, _ in await actions(console)] == ["key.rotate", "key.create", "key.revoke"]


async def thousand_keys(console: Console, signed_in: SignedIn) -> Browser:
    """An admin whose tenant has the keys `App 1` to `App 1000`."""
    browser = await signed_in()
    statement = """INSERT INTO api_keys (id, tenant_id, key_id, environment, name, secret_sha256, scopes)
        SELECT gen_random_uuid(), :tenant_id, 'key' || lpad(n::text, 13, '0'), 'live', 'App ' || n,
            sha256(n::text::bytea), '{inference}' FROM generate_series(1, 1000) AS n"""
    async with console.database.as_operator() as session:
        await session.execute(text(statement), {"tenant_id": browser.session.tenant_id})
    return browser


async def test_a_thousand_keys_are_searched_and_paged(console: Console, signed_in: SignedIn) -> None:
    browser = await thousand_keys(console, signed_in)
    page = await browser.page("/console/keys?size=25")
    assert len(page.all("main tbody tr")) == 25
    sizes = {link.text(): link.attributes["href"] for link in page.all("[aria-label='Rows of a page'] a")}
    assert sizes == {"50": "/console/keys?size=50", "100": "/console/keys?size=100"}
    rest = await browser.page(str(page.find("nav[aria-label=Pages] a").attributes["href"]))
    assert len(rest.all("main tbody tr")) == 25
    found = await browser.page("/console/keys?name=app+77")
    assert len(found.all("main tbody tr")) == 11 and found.find("input[name=name]").attributes["value"]
    assert (await browser.page("/console/keys?name=key0000000000777")).texts("tbody th") == ["App 777"]
    assert "No key has “%” in its name" in (await browser.page("/console/keys?name=%25")).text
    # A field finds every key, by name and by id, and says which one it does not know.
    for typed in ("App 5", "key0000000000005"):
        options = await browser.get(f"/console/choices?key={typed}")
        assert 'value="App 5 (key0000000000005)"' in options.text and "<html" not in options.text
        for path in ("/console/requests", "/console/usage"):
            shown = await browser.page(f"{path}?key={typed}")
            assert shown.find("#key").attributes["value"] == "App 5 (key0000000000005)"
    for path in ("/console/requests", "/console/usage"):
        unknown = await browser.get(f"{path}?key=App+0")
        assert unknown.status_code == 422 and "There is no key “App 0”." in unknown.text
        # Usage outlives its key, and the console's own keys have some, too.
        for erased in ("0" * 16, str(uuid4())):
            shown = await browser.page(f"{path}?key={erased}")
            assert shown.find("#key").attributes["value"] == erased
        unknown = await browser.get(f"{path}?adapter=nobody")
        assert unknown.status_code == 422 and "There is no adapter “nobody”." in unknown.text
    sent = "/console/limits/edit?subject=key:App+5+(key0000000000005)"
    assert (await browser.get(sent)).headers["location"] == "/console/limits/keys/key0000000000005"


async def test_a_field_asks_for_matches_as_one_types(console: Console, signed_in: SignedIn) -> None:
    browser = await thousand_keys(console, signed_in)
    async with watched_page(console, browser) as page:
        await page.goto("/console/requests")
        match = page.locator("#key-choices option[value='App 777 (key0000000000777)']")
        assert await match.count() == 0
        await page.get_by_label("Key", exact=True).press_sequentially("app 777")
        await match.wait_for(state="attached")
        await accessible(page)
        await page.goto("/console/keys/new")
        scopes = page.get_by_role("group", name="Scopes")
        assert not await scopes.is_visible()
        await page.get_by_label("Custom").check()
        assert await scopes.is_visible()
