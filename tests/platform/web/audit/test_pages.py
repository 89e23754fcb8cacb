"""Both audit logs: who may read them, filters, pages, the export, and that nothing in an entry becomes markup."""

import json
from datetime import UTC, datetime
from urllib.parse import urlencode

import pytest
from tests.platform.sent_statements import sent_statements
from tests.platform.web.browser import Console, SignedIn

from loraplex.platform.web.audit import pages as audit
from loraplex.tenants.actors import Actor
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.audit_log import AuditRepository
from loraplex.tenants.ids import uuid7
from loraplex.tenants.people import links

LOGS = (("/console/audit", "admin"), ("/operator/console/audit", "operator"))


async def write(console: Console, number: int, tenant: str = "harbor") -> None:
    tenant_id = await console.tenant(tenant)
    async with console.database.as_operator() as session:
        log = AuditRepository(session, Actor("operator", "op", "192.0.2.1", "r-1"), None)
        for each in range(number):
            fields = {"name": "<script>alert(1)</script>", "number": each}
            await log.record("key.create", f"keys/{each}", None, fields, tenant_id=tenant_id)


async def test_roles(signed_in: SignedIn) -> None:
    for role in ("admin", "developer", "billing", "viewer"):
        browser = await signed_in(role)
        for path in ("/console/audit", "/console/audit/export"):
            assert (await browser.get(path)).status_code == (200 if role == "admin" else 403), role
        assert (await browser.get("/operator/console/audit")).status_code == 303
    operator = await signed_in("operator")
    assert (await operator.get("/operator/console/audit")).status_code == 200
    assert (await operator.get("/console/audit")).status_code == 303


async def test_entries_are_paged_filtered_and_exported(console: Console, signed_in: SignedIn) -> None:
    await write(console, 52)
    await write(console, 1, "other")
    for path, role in LOGS:
        browser = await signed_in(role)
        page = await browser.page(f"{path}?actor=op")
        assert len(page.all("main tbody tr")) == 50
        assert not page.all("main script") and "alert(1)" in page.text
        assert "cannot be changed, and stay for 365 days" in page.text
        older = page.find("nav[aria-label=Pages] a").attributes["href"]
        rest = await browser.page(str(older))
        assert len(rest.all("main tbody tr")) == (2 if role == "admin" else 3)
        assert rest.texts("nav[aria-label=Pages] a") == ["Newer"]
        one = await browser.page(f"{path}?{urlencode({'target': 'keys/7', 'from': '2020-01-01'})}")
        assert one.texts("main tbody td:is(.nowrap, .wrap)") == ["key.create", "keys/7"]
        assert one.find("input[name=target]").attributes["value"] == "keys/7"
        none = await browser.page(f"{path}?to=2020-01-01")
        assert "No change matches these filters." in none.text
        export = await browser.get(f"{path}/export?actor=op")
        lines = [json.loads(line) for line in export.text.splitlines()]
        assert len(lines) == (52 if role == "admin" else 53)
        assert {line["address"] for line in lines} == {None if role == "admin" else "192.0.2.1"}
        for wrong in ("from=tomorrow", "from=0001-01-01", "to=9999-12-31", "after=1"):
            assert (await browser.get(f"{path}?{wrong}")).status_code == 400
        assert (await browser.get(f"{path}?actor=%00")).status_code == 200


async def test_an_export_is_read_in_batches_and_ends(
    console: Console, signed_in: SignedIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write(console, 6)
    monkeypatch.setattr(audit, "EXPORT_BATCH", 3)
    browser = await signed_in("admin")
    export = await browser.get("/console/audit/export?actor=op")
    targets = [json.loads(line)["target"] for line in export.text.splitlines()]
    assert targets == [f"keys/{number}" for number in (5, 4, 3, 2, 1, 0)]


async def test_a_place_in_one_log_is_none_in_the_other(console: Console, signed_in: SignedIn) -> None:
    await write(console, 52)
    admin, operator = await signed_in("admin"), await signed_in("operator")
    older = (
        (await operator.page("/operator/console/audit")).find("nav[aria-label=Pages] a").attributes["href"]
    )
    place = str(older).partition("?")[2]
    assert (await operator.get(f"/operator/console/audit?{place}")).status_code == 200
    assert (await admin.get(f"/console/audit?{place}")).status_code == 400


async def test_ids_have_names_and_the_operators_log_a_column_of_tenants(
    console: Console, signed_in: SignedIn
) -> None:
    admin = await signed_in("admin")
    tenant_id, made = admin.session.tenant_id, []
    async with console.database.as_operator() as session:
        keys = KeyRepository(session)
        made = [(await keys.create(tenant_id, f"app {each}", ["inference"])).record.key_id for each in (1, 2)]
        log = AuditRepository(session, Actor("key", made[0]), None)
        await log.record("key.change", f"keys/{made[1]}/quotas", {"a": 1}, {"a": 2}, tenant_id=tenant_id)
        target = f"tenants/{tenant_id}/credits/1"
        await log.record("credit.grant", target, None, {"a": 2}, tenant_id=tenant_id)
    page = await admin.page("/console/audit?actor=" + made[0])
    assert page.texts("main thead th")[1] == "Who"
    # A key may have the name of a person, and each name several times: the id tells them apart.
    app, other = (f"app {each} ({made[each - 1][:8]}…)" for each in (1, 2))
    assert page.texts("main tbody td:first-of-type") == [f"key {app}"] * 2
    assert page.texts("main tbody td.wrap") == ["tenants/harbor/credits/1", f"keys/{other}/quotas"]
    assert page.all("main tbody td.wrap")[1].attributes["title"] == f"keys/{made[1]}/quotas"
    operator = await signed_in("operator")
    page = await operator.page("/operator/console/audit?actor=" + made[0])
    assert page.texts("main thead th")[1:3] == ["Tenant", "Who"]
    assert page.texts("main tbody td:first-of-type") == ["harbor"] * 2
    # A tenant that is looked up for fifty entries is looked up once.
    await write(console, 50)
    with sent_statements(console.database) as statements:
        await operator.page("/operator/console/audit?size=100")
    assert sum("FROM tenants \nWHERE tenants.id IN" in each for each in statements) == 1


async def test_every_kind_of_target_is_shown(console: Console, signed_in: SignedIn) -> None:
    operator, admin = await signed_in("operator"), await signed_in("admin")
    tenant_id, user_id, unknown = admin.session.tenant_id, admin.session.user_id, uuid7()
    unnamed = (
        f"installation sign-up data-policy tenants/None users/x users/ users/{unknown} users/{{{user_id}}} /"
        " keys/(removed) engines/1 suites/s adapters/users/aliases/keys adapters/a/versions/1/evaluations"
        f" rate-cards/{unknown} invoices/{unknown} webhooks/{unknown}/deliveries/{unknown} requests/{unknown}"
    )
    async with console.database.as_operator() as session:
        # The link for the first operator is for no address.
        first, _ = await links.invite(session, "operator", "x", datetime.now(UTC))
        targets = {each: each for each in [*unnamed.split(), f"users/{first}"]}
        targets[f"users/{user_id}"] = f"users/{admin.session.email}"
        for kind, owner in (("system", None), ("user", tenant_id)):
            log = AuditRepository(session, Actor(kind, "canary"), owner)  # type: ignore[arg-type]
            for target in targets:
                await log.record("tenant.change", target, {"a": 1}, {"a": None, "b": [{"c": "é"}]})
    for browser, path, times in ((operator, LOGS[1][0], 2), (admin, LOGS[0][0], 1)):
        page = await browser.page(f"{path}?size=100&actor=canary")
        assert page.texts("main tbody td.wrap") == [*reversed(targets.values())] * times
