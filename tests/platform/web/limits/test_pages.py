"""Limits: bars, who may change what, never above the tenant's, once per form; and why a request was limited."""

import asyncio
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from tests.platform.fake_admissions import FakeAdmissions
from tests.platform.web.browser import Console, Page
from tests.platform.web.limits.test_queries import CountingAdmissions, SilentAdmissions
from tests.platform.web.observed_tenant import observed_tenant
from tests.platform.web.overview.test_pages import counters

from loraplex.platform.web.limits import replay as limit_replay
from loraplex.platform.web.limits.replay import ReplayedDraft
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.counters.counter_replies import Decision, Explanation
from loraplex.tenants.database import Database
from loraplex.tenants.ledger import usage_steps
from loraplex.tenants.models import AuditEntry, Quota


async def test_a_key_is_chosen_by_its_name(console: Console, database: Database) -> None:
    seen = observed_tenant(database.url)
    counters(console, CountingAdmissions())
    async with database.as_operator() as session:
        app = (await KeyRepository(session).create(seen.id, "app", ["inference"])).record.key_id
    browser = await console.signed_in("developer", seen.tenant.name)
    places = {"app": f"keys/{app}", "key:app": f"keys/{app}", "coral": "adapters/coral"}
    for choice, place in places.items():
        chosen = await browser.get(f"/console/limits/edit?subject={choice}")
        assert chosen.headers["location"] == f"/console/limits/{place}"
    for unknown in ("nobody", "k", "key:nobody", "adapter:nobody"):
        chosen = await browser.get(f"/console/limits/edit?subject={unknown}")
        shown = await browser.get(chosen.headers["location"])
        assert shown.status_code == 422
        assert f"“{unknown}” is no adapter" in Page(shown).find("#subject-e").text()
    chosen = await browser.get("/console/limits/edit")
    assert chosen.headers["location"] == "/console/limits"


async def test_limits_are_changed_within_those_of_the_tenant(console: Console, database: Database) -> None:
    seen = observed_tenant(database.url, tokens_per_day=1000, budget_per_month=30_000_000)
    counters(console, CountingAdmissions())
    browser = await console.signed_in("developer", seen.tenant.name)
    chosen = await browser.get(f"/console/limits/edit?subject=key:{seen.key_id}")
    path = f"/console/limits/keys/{seen.key_id}"
    assert chosen.headers["location"] == path
    shown = await browser.page(path)
    fields = shown.form(path)
    assert (
        "At most 1,000, the tenant's." in shown.text and f"/tenant/v1/keys/{seen.key_id}/quotas" in shown.text
    )
    high = await browser.post(path, {**fields, "tokens_per_day": "1001", "budget_per_month": "31"})
    assert high.status_code == 422 and 'value="1001"' in high.text
    assert Page(high).find("#tokens_per_day-e").text() == "1,001 is too much: at most 1,000, the tenant's."
    assert "$31.00 is too much: at most $30.00" in Page(high).find("#budget_per_month-e").text()
    for wrong in ({"budget_per_day": "-1"}, {"tokens_per_day": "many"}):
        assert (await browser.post(path, {**fields, **wrong})).status_code == 422
    for _ in range(2):
        saved = await browser.post(path, {**fields, "tokens_per_day": "500", "budget_per_month": "1.5"})
        assert (saved.status_code, saved.headers["location"]) == (303, "/console/limits")
    stale = await browser.submit(path, path, {"revision": "1", "tokens_per_day": "400"})
    assert stale.status_code == 422
    async with database.as_operator() as session:
        of_key = Quota.api_key_id == seen.tenant.keys[seen.key_id]
        (row,) = await session.scalars(select(Quota).where(of_key))
        of_tenant = select(AuditEntry).where(AuditEntry.tenant_id == seen.id)
        entries = await session.scalars(of_tenant.where(AuditEntry.action == "quotas.change"))
        changes = [(each.actor_kind, each.actor) for each in entries]
    assert (row.tokens_per_day, row.budget_per_month) == (500, 1_500_000)
    assert changes == [("user", browser.session.email)]
    page = await browser.page("/console/limits")
    assert f"set by {browser.session.email}" in page.text
    assert page.texts(".section h2")[:2] == ["Tenant", "Key k"]
    assert "250 of 500" in page.text and "500 of 1.00 k" in page.text


async def test_limits_of_a_group_name_it(console: Console, database: Database) -> None:
    seen = observed_tenant(database.url)
    counters(console, CountingAdmissions())
    async with database.as_operator() as session:
        keys = KeyRepository(session)
        root = await keys.get(seen.id, seen.key_id)
        session.add(Quota(tenant_id=seen.id, api_key_id=root.id, tokens_per_day=500))
        await session.flush()
        child = (await keys.create(seen.id, "child", ["inference"], parent=root)).record.key_id
    browser = await console.signed_in("developer", seen.tenant.name)
    page = await browser.page("/console/limits")
    assert page.texts(".section h2")[:2] == ["Tenant", "Group k"]
    assert "shared by this key and all below it" in page.text and "250 of 500" in page.text
    shown = await browser.page(f"/console/keys/{child}")
    assert "Limits of its group" in shown.text and "250 of 500" in shown.text
    assert "No limit of its own." in shown.text
    assert "Limits of its group" not in (await browser.page(f"/console/keys/{seen.key_id}")).text


async def test_roles_and_other_tenants(console: Console, database: Database) -> None:
    seen, other = observed_tenant(database.url, tokens_per_day=1000), observed_tenant(database.url)
    viewer = await console.signed_in("viewer", seen.tenant.name)
    page = await viewer.page("/console/limits")
    assert page.find("button[aria-disabled=true]").text() == "Set limits"
    for path in (f"/console/limits/keys/{seen.key_id}", "/console/limits/adapters/coral"):
        refused = await viewer.get(path)
        assert refused.status_code == 403 and ":write" in refused.text
    admin = await console.signed_in("admin", seen.tenant.name)
    assert (await admin.page("/console/limits/adapters/coral")).form("/console/limits/adapters/coral")
    for path in (f"/console/limits/keys/{other.key_id}", "/console/limits/adapters/none"):
        assert (await admin.get(path)).status_code == 404
    forged = await admin.post("/console/limits/adapters/coral", {"revision": "1", "tokens_per_day": "1"})
    assert forged.status_code == 403


async def test_without_counters_limits_are_shown_without_their_use(
    console: Console, database: Database
) -> None:
    seen = observed_tenant(database.url, tokens_per_day=1000)
    counters(console, SilentAdmissions())
    page = await (await console.signed_in("billing", seen.tenant.name)).page("/console/limits")
    assert "The counters of limits do not answer." in page.text and "– of 1.00 k" in page.text


async def test_why_a_request_was_limited(console: Console, database: Database) -> None:
    seen, other = observed_tenant(database.url), observed_tenant(database.url)
    admissions = console.dependencies.admission_controller
    assert isinstance(admissions, FakeAdmissions)
    refused = Decision(
        level="key",
        name="tokens_per_minute",
        limit=20_000,
        used=14_690,
        reserved=4000,
        asked=4000,
        passed=False,
        retry_after_s=9.0,
    )
    passed = replace(refused, name="budget_per_month", passed=True, retry_after_s=0.0)
    admissions.explanations[seen.id, "cc15"] = Explanation(
        request_id="cc15", at=datetime.now(UTC), decisions=(passed, refused)
    )
    browser = await console.signed_in("viewer", seen.tenant.name)
    page = await browser.page("/console/limits/explain?request=cc15")
    assert page.texts("tbody tr") == [
        "Tokens per minutekeyrefused again in 9.00 s20,00014,6904,0004,000",
        "Budget per monthkeywould pass$0.02$0.01469$0.004$0.004",
    ]
    assert (await browser.page("/console/limits/explain")).form("/console/limits/explain") == {"request": ""}
    outsider = await console.signed_in("admin", other.tenant.name)
    unknown = await outsider.page("/console/limits/explain?request=cc15")
    assert "was refused by a limit in the last 24 hours" in unknown.text and not unknown.all("tbody tr")


async def test_a_draft_of_limits_is_replayed(console: Console, database: Database) -> None:
    seen, other = observed_tenant(database.url, tokens_per_day=900), observed_tenant(database.url)
    browser = await console.signed_in("viewer", seen.tenant.name)
    page = await browser.page("/console/limits/what-if")
    assert page.find("#tokens_per_day").attributes["value"] == "900" and "Replayed" not in page.text
    page = await browser.page(
        "/console/limits/what-if?subject=tenant&tokens_per_day=&budget_per_month=0.000001"
    )
    assert "5 of 5 requests would have been refused" in page.text
    cells = page.texts("[aria-label='What each limit would have refused'] tbody td")
    assert cells[:3] == ["$0.000001", "5", "100.0 %"]
    page = await browser.page("/console/limits/what-if?subject=adapter:coral&concurrent_requests=1")
    assert "The one request would have passed." in page.text
    assert page.find("#subject").attributes["value"] == "adapter:coral"
    for query, message in (
        ("tokens_per_day=many", "tokens_per_day"),
        ("tokens_per_day=", "Type at least one limit."),
        ("budget_per_day=9000001", "9000001 is too much: at most 9000000."),
        ("budget_per_day=1e3", "“1e3” is no amount"),
    ):
        refused = await browser.get(f"/console/limits/what-if?{query}")
        assert refused.status_code == 422 and message in refused.text, query
    for subject in (f"key:{other.key_id}", "adapter:none"):
        assert (await browser.get(f"/console/limits/what-if?subject={subject}")).status_code == 404


async def test_a_tenant_has_one_replay_at_once_and_a_gateway_two(
    console: Console, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants = [observed_tenant(database.url) for _ in range(3)]
    browsers = [await console.signed_in("viewer", each.tenant.name) for each in tenants]
    running, most, of_one = Counter[UUID](), 0, 0
    replay = limit_replay.replay

    async def counted(session: AsyncSession, tenant_id: UUID, *rest: Any) -> ReplayedDraft:
        nonlocal most, of_one
        running[tenant_id] += 1
        most, of_one = max(most, running.total()), max(of_one, running[tenant_id])
        await asyncio.sleep(0.05)
        try:
            return await replay(session, tenant_id, *rest)
        finally:
            running[tenant_id] -= 1

    monkeypatch.setattr(limit_replay, "replay", counted)
    path = "/console/limits/what-if?subject=tenant&tokens_per_day=7"
    pages = await asyncio.gather(*(each.page(path) for each in browsers * 2))
    assert all("of 5 requests would have been refused" in page.text for page in pages)
    assert (most, of_one) == (2, 1)
    pages = await asyncio.gather(*(browsers[0].page(path) for _ in range(8)))
    assert any("Other replays are in progress." in page.text for page in pages)


async def test_a_replay_that_takes_too_long_says_what_helps(
    console: Console, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = observed_tenant(database.url)
    monkeypatch.setattr(usage_steps, "MAX_MILLISECONDS", 20)
    monkeypatch.setattr(usage_steps, "_OF", {"tenant": "AND pg_sleep(5) IS NOT NULL"})
    browser = await console.signed_in("viewer", seen.tenant.name)
    page = await browser.page("/console/limits/what-if?subject=tenant&tokens_per_day=7")
    assert "There are too many requests to replay now." in page.text
    assert page.find("#tokens_per_day").attributes["value"] == "7"
