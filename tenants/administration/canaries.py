"""The use case of a canary that goes back by itself. Invariant: alias, audit entry and event change in one transaction."""

from loraplex.tenants.canaries.guards import GuardedAlias
from loraplex.tenants.models import Adapter, AdapterAlias
from loraplex.tenants.registry.adapters import AdapterRepository
from loraplex.tenants.registry.aliases import AliasRepository
from loraplex.tenants.registry.records import WHOLE, AliasDocument
from loraplex.tenants.registry.use_cases import target
from loraplex.tenants.unit_of_work import UnitOfWork
from loraplex.tenants.webhooks.events import AliasReverted, add_event


async def revert(uow: UnitOfWork, place: GuardedAlias) -> AliasDocument | None:
    """Point a guarded alias at its baseline alone, if the canary has broken a bound; None if it has not, or the alias has moved.

    For an operator's unit of work. Raises `VersionNotReady` for a baseline that is not served any more.
    """
    adapter = await uow.session.get(Adapter, place.adapter_id, with_for_update=True)
    if adapter is None or adapter.deleted_at is not None:
        return None
    aliases = AliasRepository(uow.session, place.tenant_id)
    record = await uow.session.get(AdapterAlias, (place.adapter_id, place.alias))
    if record is None or record.generation != place.generation:
        return None
    before = await aliases.document(adapter.name, record)
    guard = before.guard
    if guard is None or (reason := guard.broken) is None:
        return None
    await AdapterRepository(uow.session, place.tenant_id).check_ready(adapter, guard.baseline)
    # A rollback leads to what was before the split, and not to the split without its guard.
    led = await aliases.lead(adapter, place.alias, record, {guard.baseline: WHOLE}, same=True)
    after = await aliases.document(adapter.name, led)
    counts = guard.counts.model_dump()
    noted = {"targets": after.targets, "reason": reason, **counts}
    await uow.audit.record(
        "alias.revert", target(after), {"targets": before.targets}, noted, tenant_id=place.tenant_id
    )
    event = AliasReverted(
        adapter=adapter.name,
        alias=place.alias,
        baseline=guard.baseline,
        canary=guard.canary,
        reason=reason,
        began_at=guard.began_at,
        counts=counts,
    )
    await add_event(uow.session, place.tenant_id, event)
    return after
