"""The request log and one request: its numbers are those of the ledger, and no other tenant's are found."""

from functools import partial

import pytest
from tests.platform.web.browser import Console
from tests.platform.web.gateway import SECRET
from tests.platform.web.observed_tenant import observed_tenant
from tests.tenants.ledger.stored_usage import Used, settle

from loraplex.platform.inference.sessions import session_label
from loraplex.platform.server.secret import derive
from loraplex.platform.web.console.page import SIZES
from loraplex.tenants.database import Database
from loraplex.tenants.ledger import request_log


async def test_the_log_its_filters_and_its_pages(
    console: Console, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = observed_tenant(database.url)
    browser = await console.signed_in("viewer", seen.tenant.name)
    page = await browser.page("/console/requests")
    assert len(page.all("tbody tr")) == 5 and "mine-1" in page.texts("tbody tr")[0]
    for query, rows in (
        ("outcome=failed", 1),
        ("adapter=support", 3),
        ("adapter=demo%2Fbase", 1),
        ("slower=1000", 1),
        (f"key={seen.key_id}", 5),
        ("from=2020-01-01&to=2020-01-02", 0),
    ):
        page = await browser.page(f"/console/requests?{query}")
        assert len(page.all("tbody tr")) == rows, query
    assert "No request matches." in page.text
    monkeypatch.setitem(SIZES, "25", 2)
    first = await browser.page("/console/requests?adapter=support&size=25")
    assert len(first.all("tbody tr")) == 2 and first.texts("nav[aria-label=Pages] a") == ["Older"]
    sized = first.find("nav[aria-label='Rows of a page'] a").attributes["href"]
    assert sized == "/console/requests?adapter=support&size=50"
    older = await browser.page(first.find("nav[aria-label=Pages] a").attributes["href"] or "")
    assert len(older.all("tbody tr")) == 1
    newest = older.find("nav[aria-label=Pages] a").attributes["href"]
    assert newest == "/console/requests?adapter=support&size=25"
    refused = await browser.get("/console/requests?slower=soon")
    assert refused.status_code == 422 and "“soon” is no number of milliseconds." in refused.text


async def test_a_session_and_reasoning_are_shown_where_there_are_any(
    console: Console, database: Database
) -> None:
    seen = observed_tenant(database.url)
    browser = await console.signed_in("viewer", seen.tenant.name)
    label = session_label(partial(derive, SECRET), seen.id, "my agent")
    now, key = seen.now, next(iter(seen.tenant.keys.values()))
    version = seen.tenant.version("USD", 1)
    thinking = Used(None, key, now, completion=6, reasoning=4, session=label, price_version_id=version)
    (settled,) = settle(database.url, seen.tenant, [thinking])
    for query in ("my+agent", label):
        page = await browser.page(f"/console/requests?session={query}")
        assert len(page.all("tbody tr")) == 1
    page = await browser.page(f"/console/requests/{settled}")
    assert "4 out are reasoning" in page.text
    assert page.find(f"a[href='/console/requests?session={label}']").text() == label
    cost = page.texts("[aria-label='What it cost'] tbody th")
    assert cost == ["Prompt, not cached", "Prompt, cached", "Completion", "Reasoning"]
    plain = await browser.page("/console/requests/mine-1")
    assert "reasoning" not in plain.text and "Session" not in plain.texts(".pairs dt")
    usage = await browser.page("/console/usage")
    assert "of these, reasoning" in usage.texts("thead th")
    other = observed_tenant(database.url)
    page = await (await console.signed_in("viewer", other.tenant.name)).page("/console/usage")
    assert "of these, reasoning" not in page.texts("thead th")


async def test_a_decision_has_no_first_token(console: Console, database: Database) -> None:
    seen = observed_tenant(database.url)
    key = next(iter(seen.tenant.keys.values()))
    version = seen.tenant.version("USD", 1)
    read = Used(None, key, seen.now, completion=0, duration_ms=229, price_version_id=version)
    (settled,) = settle(database.url, seen.tenant, [read])
    page = await (await console.signed_in("viewer", seen.tenant.name)).page(f"/console/requests/{settled}")
    assert page.texts(".stat dt") == ["Took", "Tokens", "Amount"]
    assert page.texts(".stat .value")[:2] == ["229 ms", "14 in 0 out"]


async def test_a_page_is_followed_by_older_requests(
    console: Console, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = observed_tenant(database.url)
    monkeypatch.setattr(request_log, "SCANNED", 2)
    browser, path, rows = (
        await console.signed_in("viewer", seen.tenant.name),
        "/console/requests?adapter=support",
        0,
    )
    while path:
        page = await browser.page(path)
        rows += len(page.all("tbody tr"))
        older = [
            node.attributes["href"] for node in page.all("nav[aria-label=Pages] a") if node.text() == "Older"
        ]
        path = (older or [""])[0] or ""
    assert rows == 3


async def test_one_request(console: Console, database: Database) -> None:
    seen, other = observed_tenant(database.url), observed_tenant(database.url)
    browser = await console.signed_in("developer", seen.tenant.name)
    page = await browser.page("/console/requests/mine-1")
    assert page.find("h1").text() == "2.41\u00a0s on coral@1"
    assert page.texts(".timeline b") == ["Adapter load", "Queue", "Prefill", "Decode"]
    assert "Most of the time went into “Decode”: 66 tokens at 29.9 ms each." in page.text
    assert "2 requests stood before it; every row of the batch was taken" in page.text
    amount = 1000 * 3_000_001 + 384 + 66 * 7_000_003
    assert page.texts("tfoot td")[-1] == f"$0.{amount:012}" and "$0.003000001" in page.text
    assert page.find(f"a[href='/console/keys/{seen.key_id}']").text() == "k"
    limits = "[aria-label='Limits it met'] tbody"
    assert page.texts(f"{limits} th") == ["Budget per daykey", "Tokens per minutetenant"]
    assert page.texts(f"{limits} td")[4:] == ["$0.401877", "5,000", "1,000", "500", "1,450", "2,050"]
    plain = await browser.page(f"/console/requests/{seen.requests[0]}")
    assert "Not stored, or not any more." in plain.text
    assert "The phases of this request are not stored" in plain.text
    for unknown in (str(other.slow), "none", "%00"):
        assert (await browser.get(f"/console/requests/{unknown}")).status_code == 404
