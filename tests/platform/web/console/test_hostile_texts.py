"""Texts that a tenant or a provider chooses are shown as text: on every page, in every form that is refused, in every file.

What a CHECK constrains to letters, digits and signs that are no markup is not planted: names of tenants, tiers, adapters, aliases and
files of uploads, currencies, emails.
"""

import csv
from datetime import UTC, datetime
from typing import Final
from urllib.parse import urlencode

import httpx
import psycopg
from tests.platform.web.browser import Browser, Console, Page
from tests.platform.web.console.other_tenant import ADAPTER, OWNER, ids_of_another_tenant
from tests.platform.web.console.test_page_roles import OPERATOR, guarded, routes_of, token_of
from tests.platform.web.evaluations.stored_evaluation import add_evaluation, stored_report
from tests.tenants.ledger.stored_usage import Used, UsingTenant, settle
from tests.tenants.registry_records import RegistryWriter, digest

from loraplex.tenants.actors import system_actor
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.invoices import use_cases as invoices
from loraplex.tenants.unit_of_work import unit_of_work

# It ends the attribute, the element or the script that it may stand in, then makes an element and an attribute.
ATTACK: Final = "\"'></textarea></title></script><x-evil data-evil>{{7*7}}"
PARAMETERS: Final = (
    "search",
    "state",
    "adapter",
    "key",
    "action",
    "actor",
    "target",
    "name",
    "request",
    "next",
    "token",
)
WITH_ADDRESSES: Final = ("href", "src", "action", "formaction", "hx-get", "hx-post")
OWN: Final = ("/", "#", "data:", "?", "http://console.test/")
CONSOLE: Final = "/console"
# Field -> how the text gets there, where no use case takes it unchecked, and a page that shows it.
STATEMENTS: Final = {
    "key author": ("UPDATE api_keys SET created_by = %s WHERE tenant_id = %s", "/keys"),
    "description": ("UPDATE adapters SET description = %s WHERE tenant_id = %s", f"/adapters/{ADAPTER}"),
    "version author": (
        "UPDATE adapter_versions SET created_by = %s WHERE tenant_id = %s",
        f"/adapters/{ADAPTER}",
    ),
    "webhook": ("UPDATE webhook_endpoints SET url = 'https://' || %s WHERE tenant_id = %s", "/webhooks"),
    "answer": (
        "UPDATE webhook_deliveries SET last_error = %s WHERE tenant_id = %s",
        "/webhooks/{webhook_id}/deliveries/{delivery_id}",
    ),
    "event": (
        "UPDATE outbox_events SET data = jsonb_build_object(%s::text, 1) WHERE tenant_id = %s",
        "/webhooks/{webhook_id}/deliveries/{delivery_id}",
    ),
    "person": (
        "UPDATE users SET name = %s WHERE id IN (SELECT user_id FROM memberships WHERE tenant_id = %s)",
        "/team",
    ),
    "browser": ("UPDATE sessions SET user_agent = %s WHERE tenant_id = %s", "/account"),
    "issuer": ("INSERT INTO tenant_billing (issuer, tenant_id) VALUES (%s, %s)", "/billing/invoices/draft"),
    "customer": (
        "UPDATE tenant_billing SET customer_name = %s WHERE tenant_id = %s",
        "/billing/invoices/draft",
    ),
    "customer's address": (
        "UPDATE tenant_billing SET customer_address = %s WHERE tenant_id = %s",
        "/billing/invoices/draft",
    ),
    "VAT id": ("UPDATE tenant_billing SET vat_id = %s WHERE tenant_id = %s", "/billing/invoices/draft"),
}
# What use cases write: field -> a page that shows it.
WRITTEN: Final = {
    "key": "/keys",
    "finding": f"/adapters/{ADAPTER}?version=2",
    "configuration": f"/adapters/{ADAPTER}?version=2",
    "target": "/audit",
    "action": "/audit",
    "before": "/audit",
    "after": "/audit",
    "credit": "/billing",
    "request id": "/requests",
    "said": f"/adapters/{ADAPTER}/evaluations/{{evaluation_id}}",
    "case": f"/adapters/{ADAPTER}/evaluations/{{evaluation_id}}",
}


async def plant(console: Console, browser: Browser) -> dict[str, str]:
    """Fill every field; return the ids of what has one."""
    ids = await ids_of_another_tenant(console)
    tenant_id = await console.tenant(OWNER)
    texts = {field: f"{field}{ATTACK}" for field in (*STATEMENTS, *WRITTEN)}
    async with unit_of_work(console.database, system_actor("test"), tenant_id, None) as uow:
        key = (await KeyRepository(uow.session).create(tenant_id, texts["key"], ("inference",))).record
        before, after = {"text": texts["before"]}, {texts["after"]: [texts["after"]]}
        await uow.audit.record(texts["action"], texts["target"], before, after)
        checks = [{"name": "finite", "passed": False, "detail": texts["finding"], "warning": False}]
        config = {"r": 8, texts["configuration"]: [texts["configuration"]]}
        await RegistryWriter(uow.session, tenant_id).add_version(
            ADAPTER,
            digest=digest(1),
            size_bytes=1,
            rank=8,
            state="ready",
            config=config,
            report={"checks": checks},
        )
    report = stored_report(text=texts["said"], name=texts["case"])
    ids["evaluation_id"] = str(await add_evaluation(console.database, tenant_id, ADAPTER, report, "planted"))
    async with unit_of_work(console.database, system_actor("test"), None, None) as uow:
        await invoices.grant_credit(
            uow, tenant_id, 500_000, texts["credit"], expires_at=datetime(2999, 1, 1, tzinfo=UTC)
        )
    used = Used(None, key.id, datetime.now(UTC), client_request_id=texts["request id"])
    settle(console.database.url, UsingTenant(tenant_id, OWNER, {}, {}), [used])
    with psycopg.connect(console.database.url) as connection:
        for field, (statement, _) in STATEMENTS.items():
            assert connection.execute(statement.encode(), (texts[field], tenant_id)).rowcount, field
    return ids


def assert_inert(page: Page, about: str) -> None:
    """Nothing on a page but what its template wrote: no element, no attribute, no script, no address of another server."""
    assert not page.all("x-evil"), about
    for node in page.tree.css("*"):
        for name, value in node.attributes.items():
            assert name != "data-evil" and name != "style" and not name.startswith("on"), (about, node.html)
            if name in WITH_ADDRESSES:
                assert (value or "").startswith(OWN) and not (value or "").startswith("//"), (
                    about,
                    node.html,
                )
    for script in page.all("script"):
        assert str(script.attributes.get("src")).startswith("/console/static/"), (about, script.html)
        assert not script.text().strip(), (about, script.html)
    assert "{{7*7}}" in page.response.text or "49}}" not in page.response.text


def is_page(answer: httpx.Response) -> bool:
    return str(answer.headers.get("content-type")).startswith("text/html")


async def test_texts_are_never_markup(console: Console) -> None:
    admin, operator = await console.signed_in("admin", OWNER), await console.signed_in("operator")
    ids = await plant(console, admin)
    given = ids | {"tenant_id": str(await console.tenant(OWNER))}
    asked = urlencode(dict.fromkeys(PARAMETERS, ATTACK))
    for route in routes_of(console.app):
        if route.method != "GET" or "/static/" in route.path:
            continue
        browser = operator if route.path.startswith("/operator/") else admin
        addresses = [route.at(given)] if route.names_something else [route.path, f"{route.path}?{asked}"]
        for address in addresses:
            answer = await browser.get(address, accept="text/html")
            assert answer.headers["x-content-type-options"] == "nosniff", address
            if is_page(answer) and not answer.is_redirect:
                assert_inert(Page(answer), address)
    pages = {field: path for field, (_, path) in STATEMENTS.items()} | WRITTEN
    for field, path in pages.items():
        page = await admin.page(CONSOLE + path.format(**ids))
        assert_inert(page, path)
        values = [str(value) for node in page.tree.css("*") for value in node.attributes.values()]
        # JSON writes a quotation mark with a backslash.
        assert f"{field}{ATTACK}" in "".join((page.find("body").text(), *values)).replace('\\"', '"'), (
            field,
            path,
        )


async def test_refused_forms_show_what_was_typed_as_text(console: Console) -> None:
    ids = await ids_of_another_tenant(console)
    given = ids | {"tenant_id": str(await console.tenant(OWNER))}
    refused = 0
    for role, home in (("admin", "/console/account"), ("operator", "/operator/console/account")):
        browser = await console.signed_in(role, OWNER)
        csrf = await token_of(browser, home)
        for route in guarded(console):
            if route.method != "GET" or (route.asks == OPERATOR) is not (role == "operator"):
                continue
            answer = await browser.get(route.at(given))
            if answer.status_code != 200 or not is_page(answer):
                continue
            for form in Page(answer).all('form[method="post"]'):
                names = [
                    str(each.attributes["name"])
                    for each in form.css("input[type=text], textarea, input[type=url]")
                ]
                if names:
                    fields = dict.fromkeys(names, ATTACK) | {"csrf": csrf}
                    sent = await browser.post(str(form.attributes["action"]), fields)
                    if is_page(sent) and not sent.is_redirect:
                        assert_inert(Page(sent), str(form.attributes["action"]))
                        refused += ATTACK in Page(sent).text
    assert refused > 5


async def test_files_are_no_pages_and_their_cells_no_formulas(console: Console) -> None:
    admin = await console.signed_in("admin", OWNER)
    await plant(console, admin)
    types = {
        "/console/usage.csv": "text/csv; charset=utf-8",
        "/console/usage.json": "application/json",
        "/console/audit/export": "application/jsonl",
        "/console/billing/invoices/draft/json": "application/json",
        "/console/billing/invoices/draft/csv": "text/csv; charset=utf-8",
    }
    for path, content_type in types.items():
        answer = await admin.get(path)
        assert answer.status_code == 200 and answer.headers["content-type"] == content_type, path
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-disposition"].startswith("attachment"), path
        if content_type.startswith("text/csv"):
            cells = [cell for row in csv.reader(answer.text.splitlines()) for cell in row]
            assert len(cells) > 10
            assert not [
                each
                for each in cells
                if each.startswith(("=", "+", "-", "@", "\t")) and not each[1:].isdecimal()
            ]
