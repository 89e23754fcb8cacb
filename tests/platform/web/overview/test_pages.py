"""The overview: its numbers are those of the API, each role sees its part, and a part that does not answer says so."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text
from tests.platform.web.browser import Console
from tests.platform.web.limits.test_queries import CountingAdmissions, SilentAdmissions
from tests.platform.web.observed_tenant import observed_tenant
from tests.tenants.ledger.stored_usage import Used, make_tenant, settle
from tests.tenants.ledger.test_request_reports import fail

from loraplex.platform.demo.history import SAMPLE_KEY
from loraplex.platform.web.console.formatting import money_spent
from loraplex.platform.web.console_app import ConsoleOptions, add_console
from loraplex.platform.web.overview import queries as overview
from loraplex.tenants.database import Database


def counters(console: Console, admissions: Any) -> None:
    """Let these answer what is used of limits."""
    console.dependencies.admission_controller.quotas = admissions.quotas  # type: ignore[method-assign]


async def test_the_numbers_of_a_tenant(console: Console, database: Database) -> None:
    seen = observed_tenant(database.url, tokens_per_day=1000, budget_per_month=10)
    counters(console, CountingAdmissions())
    limited = fail(
        *(database.url, seen.tenant, datetime.now(UTC), "rate_limit_exceeded"), status=429, omitted=3
    )
    page = await (await console.signed_in("admin", seen.tenant.name)).page("/console")
    values = dict(zip(page.texts(".stat dt"), page.texts(".stat .value"), strict=True))
    now = datetime.now(UTC)
    async with database.as_tenant(seen.id) as session:
        spent = await overview.spend(session, seen.id, "USD", now)
        found = await overview.requests(session, seen.id, "24h", now)
    assert values["Requests"] == "9" and values["Errors"] == "55.6 %"
    assert values["First token, median"] == f"{found.current.ttft_ms(50)}.0 ms".replace("100.0", "100")
    assert values[f"Spend in {now:%B}"] == money_spent(spent.month_pico, "USD")
    assert "The monthly budget of $0.00 is used up." in page.text.replace("<$0.01", "$0.00")
    rows = [row.css("td") for row in page.all("#t-requests tbody tr")]
    assert len(rows) == 24 and page.texts("#t-requests thead th") == [
        "Hour",
        "no adapter",
        "support",
        "coral",
    ]
    assert [int(cell.attributes["data-v"] or "") for cell in rows[-2]] == [5, 0, 0]
    assert [node.attributes.get("data-v") for node in page.all("#t-ttft tbody tr")[-9].css("td")] == [
        None,
        None,
    ]
    assert page.texts(".quota b")[0] == "Tokens per day" and page.find(".quota .bar rect[fill='url(#held)']")
    failures = page.texts("[aria-label='Latest failures'] tbody tr")
    assert len(failures) == 1 and "429" in failures[0] and "4" in failures[0]
    assert page.find(f"[aria-label='Latest failures'] a[href='/console/requests/{limited}']")


async def test_each_role_sees_its_part(console: Console, database: Database) -> None:
    seen = observed_tenant(database.url, budget_per_month=1)
    fail(database.url, seen.tenant, datetime.now(UTC), "model_not_found")
    counters(console, CountingAdmissions())
    tiles, keys = {}, {}
    for role in ("admin", "developer", "viewer", "billing"):
        page = await (await console.signed_in(role, seen.tenant.name)).page("/console")
        tiles[role] = len(page.all(".stat"))
        keys[role] = "Key" in page.texts("[aria-label='Latest failures'] th")
        assert page.all(".note"), "the budget concerns all"
    assert tiles == {"admin": 4, "developer": 4, "viewer": 4, "billing": 1}
    assert keys == {"admin": True, "developer": True, "viewer": False, "billing": False}
    assert "Spend per day" in page.text and "Requests by adapter" not in page.text


async def test_the_demo_says_what_is_a_sample(console: Console, database: Database) -> None:
    browser = await console.signed_in("admin", observed_tenant(database.url).tenant.name)
    told = f"Usage of the key {SAMPLE_KEY} is a sample that serve --demo wrote"
    assert told not in (await browser.page("/console")).text
    options = ConsoleOptions(is_demo=True)
    add_console(console.app, console.dependencies, options)
    assert told in (await browser.page("/console")).text


async def test_without_counters_the_rest_is_shown(console: Console, database: Database) -> None:
    seen = observed_tenant(database.url, tokens_per_day=1000)
    counters(console, SilentAdmissions())
    console.engine.unavailable = True  # type: ignore[attr-defined]
    page = await (await console.signed_in("admin", seen.tenant.name)).page("/console")
    assert "The counters of limits do not answer." in page.text and "Latest failures" in page.text


async def test_a_new_tenant_and_another_range(console: Console, database: Database) -> None:
    tenant, other = make_tenant(database.url), observed_tenant(database.url)
    page = await (await console.signed_in("admin", tenant.name)).page("/console")
    assert not page.all("figure") and other.tenant.name not in page.response.text
    browser = await console.signed_in("admin", other.tenant.name)
    for range_name, periods in (("7d", 28), ("30d", 30), ("<script>", 24)):
        page = await browser.page(f"/console?range={range_name}")
        assert len(page.all("#t-requests tbody tr")) == periods
    key, past = next(iter(tenant.keys.values())), datetime.now(UTC) - timedelta(hours=30)
    settle(database.url, tenant, [Used(None, key, past)])
    page = await (await console.signed_in("admin", tenant.name)).page("/console")
    assert "No request in the last 24 hours." in page.text and not page.all("figure")


@pytest.mark.parametrize("name", ["<img src=x onerror=alert(1)>", "{{ 7 * 7 }}"])
async def test_names_are_escaped(console: Console, database: Database, name: str) -> None:
    seen = observed_tenant(database.url)
    async with database.as_operator() as session:
        await session.execute(
            text(
                "UPDATE api_keys SET name = :name, expires_at = now() + interval '1 day' WHERE tenant_id = :id"
            ),
            {"name": name, "id": seen.id},
        )
    browser = await console.signed_in("admin", seen.tenant.name)
    for path in ("/console", "/console/usage?split=key", "/console/requests", "/console/requests/mine-1"):
        page = await browser.page(path)
        assert name in page.text and not page.all("img")
