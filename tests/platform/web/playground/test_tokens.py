"""`POST /console/token`: who gets a bearer, what it may do, for how long, and that it is no key of the tenant."""

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import insert, select
from tests.platform.web.browser import Browser, Console, SignedIn
from tests.platform.web.gateway import BASE_MODEL
from tests.platform.web.upload_server import declared

from loraplex.platform.auth import authenticator
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.audit_queries import audit_entries
from loraplex.tenants.models import ApiKey, AuditEntry, Quota, Upload
from loraplex.tenants.people.console_keys import LIFETIME

TOKEN = "/console/token"
FILES = declared({"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"})
CHAT: Any = {"model": BASE_MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


async def issued(browser: Browser, scope: str = "inference") -> httpx.Response:
    """Ask for a token as the console's scripts do."""
    page = await browser.page("/console/account")
    return await browser.post(TOKEN, {"csrf": page.form("/console/sign-out")["csrf"], "scope": scope})


async def called(console: Console, key: str, path: str = "/v1/models") -> int:
    http = await console.browser()
    return (await http.get(path, headers={"authorization": f"Bearer {key}"})).status_code


async def test_a_bearer_of_ten_minutes_that_is_no_key_of_the_tenant(
    console: Console, signed_in: SignedIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = await signed_in("developer")
    tenant_id = browser.session.tenant_id
    assert tenant_id is not None
    async with console.database.as_operator() as session:
        await session.execute(insert(Quota).values(tenant_id=tenant_id, max_keys=1))
    tokens = [(await issued(browser)).json() for _ in range(3)]
    response = await issued(browser)
    assert response.status_code == 200 and response.headers["cache-control"] == "no-store"
    document = response.json()
    key = document["api_key"]
    assert len({each["api_key"] for each in tokens} | {key}) == 4
    ends = datetime.fromisoformat(document["expires_at"])
    assert timedelta() < LIFETIME - (ends - datetime.now(UTC)) < timedelta(seconds=60)
    assert LIFETIME == timedelta(minutes=10) and 540 < document["expires_in"] <= 600

    # The oldest has ended, also where this gateway knows it; the uploader's are counted apart.
    assert [await called(console, each["api_key"]) for each in (*tokens, document)] == [401, 200, 200, 200]
    uploader = (await issued(browser, "adapters:write")).json()["api_key"]
    assert await called(console, uploader, "/tenant/v1/adapters") == 200
    # What it does, its person did.
    http = await console.browser({})
    bearer = {"authorization": f"Bearer {uploader}"}
    await http.post("/tenant/v1/adapters", json={"name": "pirate"}, headers=bearer)
    opened = await http.post("/tenant/v1/adapters/pirate/uploads", json={"files": FILES}, headers=bearer)
    assert opened.status_code == 201, opened.text
    async with console.database.as_operator() as session:
        found = await audit_entries(session, tenant_id, {"actor": browser.session.email}, None, 9)
        assert {(each.action, each.actor_kind) for each in found} >= {
            *(("adapter.create", "user"), ("upload.open", "user"))
        }
        assert await session.scalar(select(Upload.created_by)) == browser.session.email
    again = (await issued(browser)).json()["api_key"]
    assert [await called(console, each["api_key"]) for each in tokens] == [401, 401, 200]
    assert [await called(console, each) for each in (key, again)] == [200, 200]

    # It is limited and billed as a key of the name `playground`, which no list shows and no bound counts.
    http = await console.browser({})
    answer = await http.post("/v1/chat/completions", json=CHAT, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200
    async with console.database.as_operator() as session:
        rows = (await session.execute(select(ApiKey.name, ApiKey.scopes, ApiKey.created_by))).all()
        assert {tuple(map(str, row)) for row in rows} == {
            ("playground", "['inference']", browser.session.email),
            ("uploader", "['adapters:read', 'adapters:write']", browser.session.email),
        }
        assert await KeyRepository(session).list(tenant_id) == []
        await KeyRepository(session).create(tenant_id, "app", ["inference"])
        actions = await session.scalars(select(AuditEntry.action))
        assert not [each for each in actions if each.startswith("key.")]

    for ahead, status in ((LIFETIME - timedelta(seconds=60), 200), (LIFETIME + timedelta(seconds=1), 401)):

        class Later(datetime):
            now = staticmethod(lambda tz=None, ahead=ahead: datetime.now(tz) + ahead)

        with monkeypatch.context() as patch:
            patch.setattr(authenticator, "datetime", Later)
            assert await called(console, key) == status


SCOPES = (
    ("admin", "inference", 200),
    ("admin", "adapters:write", 200),
    ("developer", "adapters:write", 200),
    ("admin", "tenant:admin", 400),
    ("admin", "operator", 400),
    ("admin", "", 400),
    ("viewer", "inference", 403),
    ("viewer", "adapters:write", 403),
    ("billing", "inference", 403),
)


async def test_a_token_has_a_scope_of_its_role_and_no_other(console: Console, signed_in: SignedIn) -> None:
    browsers = {role: await signed_in(role) for role in ("admin", "developer", "billing", "viewer")}
    for role, scope, status in SCOPES:
        response = await issued(browsers[role], scope)
        assert response.status_code == status, (role, scope)
        if status != 200:
            assert response.json()["error"]["param"] == (scope if status == 403 else "scope")
    playground = (await issued(browsers["admin"])).json()["api_key"]
    uploader = (await issued(browsers["admin"], "adapters:write")).json()["api_key"]
    paths = ("/v1/models", "/tenant/v1/adapters", "/tenant/v1/keys", "/operator/v1/tenants")
    assert [await called(console, playground, path) for path in paths] == [200, 403, 403, 403]
    assert [await called(console, uploader, path) for path in paths] == [403, 200, 403, 403]


async def test_only_a_page_of_the_same_session_gets_one(console: Console, signed_in: SignedIn) -> None:
    browser, other = await signed_in("developer"), await signed_in("developer", tenant="other")
    csrf = (await browser.page("/console/account")).form("/console/sign-out")["csrf"]
    fields = {"csrf": csrf, "scope": "inference"}
    refused = [
        await browser.post(TOKEN, {"scope": "inference"}),
        await other.post(TOKEN, fields),
        await browser.post(TOKEN, fields, origin="https://elsewhere.example"),
        await browser.http.post(TOKEN, data=fields),
    ]
    assert [(each.status_code, each.json()["error"]["code"]) for each in refused] == [
        (403, "form_refused")
    ] * 4
    signed_out = await (await console.browser()).post(
        TOKEN, data=fields, headers={"origin": "http://console.test"}
    )
    assert (signed_out.status_code, signed_out.json()["error"]["code"]) == (401, "session_ended")
    operators = await (await signed_in("operator")).post(TOKEN, fields)
    assert operators.status_code == 401
    assert (await browser.get(TOKEN)).status_code == 404
