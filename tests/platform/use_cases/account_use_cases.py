"""The rows of the walk for tenants, keys and limits."""

from dataclasses import replace
from typing import Final

from tests.platform.use_cases.use_case import UseCase, Way
from tests.platform.use_cases.walked_world import NO_ID, Outcome, World
from tests.tenants.ledger.settled_rows import AT, reservation, usage
from tests.tenants.registry_records import RegistryWriter
from tests.tenants.webhooks.webhooks import add_event, add_webhook, dispatched, end

from loraplex.tenants.actors import system_actor
from loraplex.tenants.administration import tenants
from loraplex.tenants.api_keys import use_cases as api_keys
from loraplex.tenants.billing import use_cases as billing
from loraplex.tenants.billing import use_cases as rate_cards
from loraplex.tenants.ids import uuid7_from
from loraplex.tenants.ledger import use_cases as usage_corrections
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.quotas import use_cases as quotas
from loraplex.tenants.recordings import use_cases as recordings
from loraplex.tenants.unit_of_work import unit_of_work
from loraplex.tenants.webhooks import use_cases as webhooks

NO_KEY: Final = "nonesuchnone"
USED: Final = uuid7_from(AT)


async def _create_with_limit(world: World) -> Outcome:
    created = await world.operator("POST", "/tenants", {"name": "island", "tier": "gold", "weight": 2})
    path = f"/tenants/{created.document['id']}/quotas"
    return await world.operator("PATCH", path, {"tokens_per_day": 5}, if_match="1")


async def _suspend(world: World) -> None:
    async with unit_of_work(world.database, system_actor("walk"), None, None) as uow:
        await tenants.suspend(uow, world.tenant_id)


async def _add_adapter(world: World) -> None:
    async with world.database.as_tenant(world.tenant_id) as session:
        await RegistryWriter(session, world.tenant_id).get_or_create("support")


async def _use(world: World) -> None:
    ledger = UsageLedger(world.database)
    admitted = reservation(world.tenant_id)
    await ledger.settle(replace(admitted, request=replace(admitted.request, id=USED)), usage())
    await ledger.close()


def _correct(request_id: object) -> Way:
    body = {"request_id": str(request_id), "reason": "the engine was broken"}
    return lambda world: world.operator("POST", "/usage/corrections", body)


TENANTS: Final = (
    UseCase(
        function=tenants.create,
        entries=("tenant.create", "quotas.change"),
        http=_create_with_limit,
        command=lambda world: world.command(
            *("tenant", "create", "island", "--tier", "gold", "--weight", "2"),
            *("--limit", "tokens_per_day=5"),
        ),
        refused_http=lambda world: world.operator("POST", "/tenants", {"name": "harbor"}),
        refused_command=lambda world: world.command("tenant", "create", "harbor"),
    ),
    UseCase(
        function=tenants.suspend,
        entries=("tenant.suspend",),
        http=lambda world: world.operator("POST", f"/tenants/{world.tenant_id}/suspend"),
        command=lambda world: world.command("tenant", "suspend", "harbor"),
        refused_http=lambda world: world.operator("POST", f"/tenants/{NO_ID}/suspend"),
        refused_command=lambda world: world.command("tenant", "suspend", "nonesuch"),
    ),
    UseCase(
        function=tenants.resume,
        entries=("tenant.resume",),
        given=_suspend,
        http=lambda world: world.operator("POST", f"/tenants/{world.tenant_id}/resume"),
        command=lambda world: world.command("tenant", "resume", "harbor"),
        refused_http=lambda world: world.operator("POST", f"/tenants/{NO_ID}/resume"),
        refused_command=lambda world: world.command("tenant", "resume", "nonesuch"),
    ),
    UseCase(
        function=tenants.delete,
        entries=("tenant.delete",),
        http=lambda world: world.operator("DELETE", f"/tenants/{world.tenant_id}"),
        command=lambda world: world.command("tenant", "delete", "harbor", "--yes"),
        refused_http=lambda world: world.operator("DELETE", f"/tenants/{NO_ID}"),
        refused_command=lambda world: world.command("tenant", "delete", "nonesuch", "--yes"),
    ),
    UseCase(
        function=tenants.change_tier,
        entries=("tenant.change_tier",),
        http=lambda world: world.operator(
            "PATCH", f"/tenants/{world.tenant_id}/tier", {"tier": "gold"}, if_match="1"
        ),
        refused_http=lambda world: world.operator(
            "PATCH", f"/tenants/{world.tenant_id}/tier", {"tier": "gold"}, if_match="9"
        ),
    ),
)

KEYS: Final = (
    UseCase(
        function=api_keys.create,
        entries=("key.create",),
        http=lambda world: world.tenant("POST", "/keys", {"name": "new", "allowed_cidrs": ["10.0.0.0/8"]}),
        command=lambda world: world.command(
            *("key", "create", "--tenant", "harbor", "--name", "new", "--allowed-cidr", "10.0.0.0/8")
        ),
        refused_http=lambda world: world.tenant("POST", "/keys", {"name": "new", "scopes": ["operator"]}),
        refused_command=lambda world: world.command(
            *("key", "create", "--tenant", "harbor", "--name", "new", "--scope", "operator")
        ),
    ),
    UseCase(
        function=api_keys.create,
        entries=("key.create",),
        command=lambda world: world.command("key", "create", "--operator"),
        refused_command=lambda world: world.command("key", "create", "--operator", "--scope", "inference"),
    ),
    UseCase(
        function=api_keys.change,
        entries=("key.change",),
        http=lambda world: world.tenant("PATCH", f"/keys/{world.key_id}", {"name": "x"}, if_match="1"),
        refused_http=lambda world: world.tenant(
            "PATCH", f"/keys/{world.key_id}", {"name": "x"}, if_match="9"
        ),
    ),
    UseCase(
        function=api_keys.rotate,
        entries=("key.rotate", "key.create"),
        http=lambda world: world.tenant("POST", f"/keys/{world.key_id}/rotate", {"grace_seconds": 60}),
        command=lambda world: world.command(
            "key", "rotate", world.key_id, "--tenant", "harbor", "--grace-seconds", "60"
        ),
        refused_http=lambda world: world.tenant("POST", f"/keys/{NO_KEY}/rotate"),
        refused_command=lambda world: world.command("key", "rotate", NO_KEY, "--tenant", "harbor"),
    ),
    UseCase(
        function=api_keys.revoke,
        entries=("key.revoke",),
        http=lambda world: world.tenant("DELETE", f"/keys/{world.key_id}"),
        command=lambda world: world.command("key", "revoke", world.key_id, "--tenant", "harbor"),
        refused_http=lambda world: world.tenant("DELETE", f"/keys/{NO_KEY}"),
        refused_command=lambda world: world.command("key", "revoke", NO_KEY, "--tenant", "harbor"),
    ),
)

BEGINS: Final = "2030-01-31T12:00:00Z"
PRICED: Final = {"prompt": 3, "cached_prompt": 1, "completion": 7}


async def _schedule_price(world: World) -> None:
    body = {"scope": {"tenant_id": str(world.tenant_id)}, "currency": "USD", "prices": PRICED}
    assert (await world.operator("POST", "/rate-cards", {**body, "effective_from": BEGINS})).accepted


def _price_body(world: World, begins: str) -> dict[str, object]:
    scope = {"tenant_id": str(world.tenant_id)}
    return {"scope": scope, "currency": "USD", "prices": PRICED, "effective_from": begins}


def _price_arguments(begins: str) -> tuple[str, ...]:
    return (
        *("rate-card", "create", "--tenant", "harbor", "--currency", "USD", "--effective-from", begins),
        *("--prompt", "3", "--cached-prompt", "1", "--completion", "7"),
    )


BILLING: Final = (
    UseCase(
        function=rate_cards.create,
        entries=("rate-card.create",),
        given=_schedule_price,
        http=lambda world: world.operator("POST", "/rate-cards", _price_body(world, "2030-06-01T00:00:00Z")),
        command=lambda world: world.command(*_price_arguments("2030-06-01T00:00:00Z")),
        refused_http=lambda world: world.operator("POST", "/rate-cards", _price_body(world, BEGINS)),
        refused_command=lambda world: world.command(*_price_arguments(BEGINS)),
    ),
    UseCase(
        function=billing.change_billing,
        entries=("billing.change",),
        http=lambda world: world.operator(
            "PATCH", f"/tenants/{world.tenant_id}/billing", {"vat_id": "DE1"}, if_match="1"
        ),
        refused_http=lambda world: world.operator(
            "PATCH", f"/tenants/{world.tenant_id}/billing", {"vat_id": "DE1"}, if_match="9"
        ),
    ),
)

LIMITS: Final = (
    UseCase(
        function=quotas.change,
        entries=("quotas.change",),
        http=lambda world: world.operator(
            "PATCH", f"/tenants/{world.tenant_id}/quotas", {"tokens_per_day": 5}, if_match="1"
        ),
        refused_http=lambda world: world.operator(
            "PATCH", f"/tenants/{world.tenant_id}/quotas", {"tokens_per_day": 5}, if_match="9"
        ),
    ),
    UseCase(
        function=quotas.narrow_key,
        entries=("quotas.change",),
        http=lambda world: world.tenant(
            "PUT", f"/keys/{world.key_id}/quotas", {"tokens_per_day": 5}, if_match="1"
        ),
        refused_http=lambda world: world.tenant(
            "PUT", f"/keys/{world.key_id}/quotas", {"tokens_per_day": 5}, if_match="9"
        ),
    ),
    UseCase(
        function=quotas.narrow_adapter,
        entries=("quotas.change",),
        given=_add_adapter,
        http=lambda world: world.tenant(
            "PUT", "/adapters/support/quotas", {"tokens_per_day": 5}, if_match="1"
        ),
        refused_http=lambda world: world.tenant("PUT", "/adapters/nonesuch/quotas", {}, if_match="1"),
    ),
)


async def _add_webhook(world: World) -> None:
    await add_webhook(world.database, world.tenant_id)


async def _add_dead_delivery(world: World) -> None:
    endpoint_id = await add_webhook(world.database, world.tenant_id)
    await add_event(world.database, world.tenant_id)
    await end(world.database, await dispatched(world.database, endpoint_id), "dead")


async def _of_webhook(
    world: World, method: str, path: str = "", body: object = None, **headers: str
) -> Outcome:
    """Of the one webhook of the world."""
    listed = (await world.tenant("GET", "/webhooks")).document
    return await world.tenant(method, f"/webhooks/{listed['data'][0]['id']}{path}", body, **headers)


async def _replay(world: World) -> Outcome:
    listed = (await _of_webhook(world, "GET", "/deliveries?state=dead")).document
    return await _of_webhook(world, "POST", f"/deliveries/{listed['data'][0]['id']}/replay")


async def _discard(world: World) -> Outcome:
    listed = (await _of_webhook(world, "GET", "/deliveries?state=dead")).document
    return await _of_webhook(world, "DELETE", f"/deliveries/{listed['data'][0]['id']}")


NEW_WEBHOOK: Final = {"url": "https://example.com/hooks", "events": ["adapter.ready"]}
WEBHOOKS: Final = (
    UseCase(
        function=webhooks.create,
        entries=("webhook.create",),
        http=lambda world: world.tenant("POST", "/webhooks", NEW_WEBHOOK),
        refused_http=lambda world: world.tenant(
            "POST", "/webhooks", {**NEW_WEBHOOK, "url": "https://10.0.0.1/"}
        ),
    ),
    UseCase(
        function=webhooks.change,
        entries=("webhook.change",),
        given=_add_webhook,
        http=lambda world: _of_webhook(world, "PATCH", "", {"events": ["quota.threshold"]}, if_match="1"),
        refused_http=lambda world: _of_webhook(
            world, "PATCH", "", {"events": ["quota.threshold"]}, if_match="9"
        ),
    ),
    UseCase(
        function=webhooks.rotate,
        entries=("webhook.rotate",),
        given=_add_webhook,
        http=lambda world: _of_webhook(world, "POST", "/rotate", {"grace_seconds": 60}),
        refused_http=lambda world: world.tenant("POST", f"/webhooks/{NO_ID}/rotate"),
    ),
    UseCase(
        function=webhooks.delete,
        entries=("webhook.delete",),
        given=_add_webhook,
        http=lambda world: _of_webhook(world, "DELETE"),
        refused_http=lambda world: world.tenant("DELETE", f"/webhooks/{NO_ID}"),
    ),
    UseCase(
        function=webhooks.replay,
        entries=("webhook.replay",),
        given=_add_dead_delivery,
        http=_replay,
        refused_http=lambda world: _of_webhook(world, "POST", f"/deliveries/{NO_ID}/replay"),
    ),
    UseCase(
        function=webhooks.discard,
        entries=("webhook.discard",),
        given=_add_dead_delivery,
        http=_discard,
        refused_http=lambda world: _of_webhook(world, "DELETE", f"/deliveries/{NO_ID}"),
    ),
)
USAGE: Final = (
    UseCase(
        function=usage_corrections.reverse,
        entries=("usage.correct",),
        given=_use,
        http=_correct(USED),
        refused_http=_correct(NO_ID),
    ),
)


_RECORDED: Final = {"record_requests": {"percent": 5, "retention_days": 7, "max_requests": 100}}
RECORDINGS: Final = (
    UseCase(
        function=recordings.set_data_policy,
        entries=("data_policy.change",),
        http=lambda world: world.tenant("PUT", "/data-policy", _RECORDED, if_match="1"),
        refused_http=lambda world: world.tenant("PUT", "/data-policy", _RECORDED, if_match="2"),
    ),
)
