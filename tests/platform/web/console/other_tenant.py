"""A tenant with one of everything that a page has an id of."""

from datetime import UTC, datetime

from tests.platform.web.browser import Console
from tests.platform.web.evaluations.stored_evaluation import add_evaluation
from tests.platform.web.invoices.drafted_invoice import draft_invoice
from tests.tenants.ledger.stored_usage import Used, UsingTenant, settle
from tests.tenants.people.people_world import add_person, signed_in
from tests.tenants.registry_records import AliasWriter, RegistryWriter
from tests.tenants.webhooks.webhooks import add_event, add_webhook, dispatched

from loraplex.tenants.api_keys.keys import KeyRepository

OWNER = "lighthouse"
DIGEST = "b" * 64
ADAPTER = "lanternkeeper"


async def ids_of_another_tenant(console: Console) -> dict[str, str]:
    """Make the tenant `OWNER`; return its ids by the names of placeholders in paths."""
    tenant_id = await console.tenant(OWNER)
    async with console.database.as_operator() as session:
        issued = await KeyRepository(session).create(tenant_id, "target", ["inference"])
        adapters = RegistryWriter(session, tenant_id)
        await adapters.get_or_create(ADAPTER)
        version = await adapters.add_version(
            ADAPTER, digest=DIGEST, size_bytes=1, rank=8, config={}, report={}
        )
        await AliasWriter(session, tenant_id).set(ADAPTER, "production", {version.version: 100})
    used = Used(
        None,
        issued.record.id,
        datetime.now(UTC),
        client_request_id="req-of-lighthouse",
        phases={"queue": [1, 2]},
    )
    settle(console.database.url, UsingTenant(tenant_id, OWNER, {}, {}), [used])
    webhook_id = await add_webhook(console.database, tenant_id)
    await add_event(console.database, tenant_id)
    delivery_id = await dispatched(console.database, webhook_id)
    member = await add_person(console.database, "keeper@lighthouse.example", roles={tenant_id: "viewer"})
    signed = await signed_in(console.database, "keeper@lighthouse.example")
    session_id = signed.session.id
    return {
        "key_id": issued.record.key_id,
        "name": ADAPTER,
        "version": str(version.version),
        "alias": "production",
        "request_id": "req-of-lighthouse",
        "webhook_id": str(webhook_id),
        "delivery_id": str(delivery_id),
        "invoice_id": await draft_invoice(console.database, tenant_id),
        "format_name": "csv",
        "evaluation_id": str(await add_evaluation(console.database, tenant_id, ADAPTER)),
        "entry_id": str(member),
        "session_id": str(session_id),
    }
