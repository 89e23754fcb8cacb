"""Statements of each page: as many with thirty of everything as with one, and few.

Invariant: every page is opened but those that are left out by name; statements that set a role count too.
"""

from typing import Any, Final
from uuid import UUID

from sqlalchemy import text
from tests.platform.sent_statements import sent_statements
from tests.platform.web.browser import Browser, Console
from tests.platform.web.console.test_page_roles import Route, guarded
from tests.platform.web.evaluations.stored_evaluation import add_evaluation
from tests.platform.web.invoices.drafted_invoice import draft_invoice
from tests.tenants.webhooks.webhooks import add_event, add_webhook, dispatched

from loraplex.tenants.database import Database

MANY: Final = 30
MAX_STATEMENTS: Final = 14
"""Of any page: two take a role, one reads the session."""
MORE: Final = {
    "/console": 18,
    "/console/adapters/{name}": 19,
    "/console/billing": 41,
    "/console/billing/invoices/{invoice_id}": 15,
    "/operator/console/invoices": 20,
    "/operator/console/invoices/{invoice_id}": 16,
    "/operator/console/invoices/{invoice_id}/actions/void": 16,
}
"""Pages of several parts, with bounds of their own."""
NOT_OPENED: Final = {
    "/console/limits/edit": "leads on to the form of the subject in its query, which is opened",
    "/console/requests/{request_id}": "shows one request, and lists nothing",
}
"""Pages that are left out, and why."""
THINGS: Final = (
    "INSERT INTO adapters (id, tenant_id, name) SELECT md5('adapter' || n)::uuid, :tenant_id, 'adapter-' || n FROM numbers",
    # The first adapter has a version for each number, every other one its first.
    """
    INSERT INTO adapter_versions (id, tenant_id, adapter_id, version, digest, state, size_bytes, rank, config, report)
    SELECT gen_random_uuid(), :tenant_id, a.id, v, md5(n::text) || md5(v::text), 'ready', 1, 8, '{}', '{}'
    FROM numbers CROSS JOIN LATERAL (
        VALUES (md5('adapter' || n)::uuid, 1), (md5('adapter1')::uuid, n + 1)
    ) a (id, v)
    """,
    """
    INSERT INTO adapter_aliases (adapter_id, alias, tenant_id)
    SELECT a.id, a.alias, :tenant_id FROM numbers CROSS JOIN LATERAL (
        VALUES (md5('adapter' || n)::uuid, 'production'), (md5('adapter1')::uuid, 'canary-' || n)
    ) a (id, alias)
    """,
    """
    INSERT INTO alias_targets (adapter_id, alias, generation, version, tenant_id, weight)
    SELECT a.id, a.alias, 1, 1, :tenant_id, 100 FROM numbers CROSS JOIN LATERAL (
        VALUES (md5('adapter' || n)::uuid, 'production'), (md5('adapter1')::uuid, 'canary-' || n)
    ) a (id, alias)
    """,
    """
    INSERT INTO suites (id, tenant_id, name, sha256, cases, size_bytes, content, created_by)
    SELECT md5('suite' || n)::uuid, :tenant_id, 'suite-' || n, 'a', 1, 1, '', 'olga' FROM numbers
    """,
    """
    INSERT INTO alias_gates (adapter_id, alias, tenant_id, suite, suite_sha256, min_pass, changed_by)
    SELECT md5('adapter1')::uuid, 'canary-' || n, :tenant_id, 'suite-1', 'a', 0.5, 'olga' FROM numbers
    """,
    """
    INSERT INTO evaluations (id, tenant_id, adapter_id, version, suite, suite_sha256, profile, seed, state, total, key_id,
        created_by)
    SELECT md5('evaluation' || n)::uuid, :tenant_id, md5('adapter1')::uuid, 1, 'suite-1', 'a', '{}', 0, 'queued', 1, 'key', 'olga'
    FROM numbers
    """,
    """
    INSERT INTO uploads (id, tenant_id, adapter_id, files, size_bytes, part_size, state, expires_at)
    SELECT md5('upload' || n)::uuid, :tenant_id, md5('adapter1')::uuid, '[{"name": "a", "size": 1, "sha256": "b"}]', 1, 1,
        'open', now() + interval '1 day' FROM numbers
    """,
    """
    INSERT INTO api_keys (id, tenant_id, key_id, environment, secret_sha256, name, scopes, created_by)
    SELECT md5('key' || n)::uuid, :tenant_id, left(md5('public' || n), 16), 'live', sha256(n::text::bytea), 'key ' || n,
        '{inference}', 'olga@harbor.example' FROM numbers
    """,
    """
    INSERT INTO quotas (id, tenant_id, api_key_id, adapter_id, requests_per_minute, budget_per_month)
    SELECT gen_random_uuid(), :tenant_id, q.key, q.adapter, 60, 1000000 FROM numbers CROSS JOIN LATERAL (
        VALUES (md5('key' || n)::uuid, NULL), (NULL, md5('adapter' || n)::uuid)
    ) q (key, adapter)
    """,
    "INSERT INTO users (id, email, name) SELECT md5('user' || n)::uuid, 'user' || n || '@harbor.example', 'User' FROM numbers",
    "INSERT INTO memberships (tenant_id, user_id, role) SELECT :tenant_id, md5('user' || n)::uuid, 'viewer' FROM numbers",
    """
    INSERT INTO audit_entries (id, tenant_id, actor_kind, actor, action, target)
    SELECT gen_random_uuid(), :tenant_id, 'operator', 'olga', 'quotas.change', 'keys/' || left(md5('public' || n), 16) || '/quotas'
    FROM numbers
    """,
    "INSERT INTO tenants (id, name) SELECT md5('tenant' || n)::uuid, 'tenant-' || n FROM numbers",
    """
    INSERT INTO usage_rollups
    SELECT u.tenant_id, date_trunc('hour', now(), 'UTC'), md5('adapter' || n)::uuid, md5('key' || n)::uuid, :no_id, 'USD', 1,
        2, 3, 4, 5
    FROM numbers CROSS JOIN LATERAL (VALUES (md5('tenant' || n)::uuid), (:tenant_id)) u (tenant_id)
    """,
    """
    INSERT INTO request_rollups
    SELECT :tenant_id, date_trunc('hour', now(), 'UTC'), md5('adapter' || n)::uuid, md5('key' || n)::uuid, status, 1,
        array_fill(0::bigint, ARRAY[16]), array_fill(0::bigint, ARRAY[16])
    FROM numbers CROSS JOIN unnest(ARRAY['completed', 'failed']) status
    """,
    """
    INSERT INTO credit_grants (id, tenant_id, currency, amount_micro, priority, reason)
    SELECT gen_random_uuid(), :tenant_id, 'USD', 1000000, 50, 'goodwill' FROM numbers
    """,
    """
    WITH cards AS (
        INSERT INTO rate_cards (scope, tenant_id, currency) SELECT 'tenant', md5('tenant' || n)::uuid, 'USD' FROM numbers
        RETURNING id
    )
    INSERT INTO price_versions (id, rate_card_id, version, prompt, cached_prompt, completion, effective)
    SELECT gen_random_uuid(), id, 1, 100, 50, 400, tstzrange(now() - interval '1 day', NULL) FROM cards
    """,
)
"""What a page lists. `numbers`: those of the things that are made."""


async def test_thirty_of_everything_are_read_by_as_many_statements_as_one(console: Console) -> None:
    admin, operator = await console.signed_in(), await console.signed_in("operator")
    tenant_id = await console.tenant("harbor")
    ids = await one_of_everything(console.database, tenant_id, str(admin.session.user_id))
    routes = [route for route in guarded(console) if route.method == "GET"]
    first = await statements(console, admin, operator, routes, ids)
    await make(console.database, tenant_id, 2, MANY)
    for _ in range(MANY):
        await add_event(console.database, tenant_id)
    await add_webhook(console.database, tenant_id)
    await dispatched(console.database, UUID(ids["webhook_id"]))
    then = await statements(console, admin, operator, routes, ids)
    assert then == first
    assert len(first) > 50
    assert {path: n for path, n in first.items() if n > MORE.get(path, MAX_STATEMENTS)} == {}


async def one_of_everything(database: Database, tenant_id: UUID, user_id: str) -> dict[str, str]:
    """Make the first of each; return their ids by the names of placeholders in paths."""
    await make(database, tenant_id, 1, 1)
    endpoint_id = await add_webhook(database, tenant_id)
    await add_event(database, tenant_id)
    delivery_id = await dispatched(database, endpoint_id)
    async with database.as_operator() as session:
        key_id = (await session.scalars(text("SELECT min(key_id) FROM api_keys"))).one()
    return {
        "key_id": key_id,
        "name": "adapter-1",
        "version": "1",
        "number": "0",
        "alias": "production",
        "tenant_id": str(tenant_id),
        "webhook_id": str(endpoint_id),
        "delivery_id": str(delivery_id),
        "invoice_id": await draft_invoice(database, tenant_id),
        "entry_id": user_id,
        "format_name": "csv",
        "evaluation_id": str(await add_evaluation(database, tenant_id, "adapter-1")),
    }


async def make(database: Database, tenant_id: UUID, first: int, last: int) -> None:
    """Make the things of these numbers."""
    parameters: dict[str, Any] = {"tenant_id": tenant_id, "no_id": UUID(int=0)}
    numbers = f"WITH numbers AS (SELECT generate_series({first}, {last}) AS n)"
    for statement in THINGS:
        whole = (
            statement.strip().replace("WITH ", f"{numbers}, ", 1)
            if "WITH " in statement
            else f"{numbers} {statement}"
        )
        async with database.as_operator() if "rollups" not in statement else database.as_writer() as session:
            used = {name: value for name, value in parameters.items() if f":{name}" in statement}
            await session.execute(text(whole), used)


async def statements(
    console: Console, admin: Browser, operator: Browser, routes: list[Route], ids: dict[str, str]
) -> dict[str, int]:
    """The number of statements of each page but `NOT_OPENED`, by its path."""
    found = {}
    for route in routes:
        if route.path in NOT_OPENED:
            continue
        browser = operator if route.path.startswith("/operator/") else admin
        with sent_statements(console.database) as sent:
            answer = await browser.http.get(route.at(ids))
        assert answer.status_code == 200, route.path
        found[route.path] = len(sent)
    return found
