"""Use cases on aliases: move, roll back, delete.

Invariant: a move that changes no target writes no audit entry.
"""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from loraplex.tenants.canaries.guards import check_guard
from loraplex.tenants.canaries.records import GuardBounds
from loraplex.tenants.errors import AliasMoved, InUse, NoPreviousVersion
from loraplex.tenants.models import AliasGate
from loraplex.tenants.names import check_alias_name
from loraplex.tenants.registry.adapters import AdapterRepository
from loraplex.tenants.registry.aliases import AliasRepository, check_targets
from loraplex.tenants.registry.records import ABSENT, AliasDocument
from loraplex.tenants.unit_of_work import UnitOfWork


async def move(
    uow: UnitOfWork,
    tenant_id: UUID,
    name: str,
    alias: str,
    targets: Mapping[int, int],
    *,
    guard: GuardBounds | None = None,
    seen: int | None = None,
) -> AliasDocument:
    """Point an alias to ready versions (version -> weight in percent), and create it if there is none. `guard`: what the newer
    one of two must keep; None ends a guard.

    `seen`: the generation that the author has read, `ABSENT` for no alias, None for any. Raises `InvalidField`,
    `AdapterNotFound`, `VersionNotFound`, `VersionNotReady`, `AliasMoved`.
    """
    check_targets(targets)
    aliases = AliasRepository(uow.session, tenant_id)
    adapters = AdapterRepository(uow.session, tenant_id)
    adapter = await adapters.locked(name)
    for version in targets:
        await adapters.check_ready(adapter, version)
    record = await aliases.find(adapter, check_alias_name(alias))
    before = None if record is None else await aliases.document(name, record)
    _require_seen(name, alias, ABSENT if before is None else before.revision, seen)
    present = None if before is None else before.guard
    if guard is not None:
        former = () if before is None else (before.baseline, before.main_version)
        guard = check_guard(guard, targets, former)
    same = before is not None and before.targets == targets
    if before is not None and same and guard == (present and present.bounds):
        return before
    led = await aliases.lead(adapter, alias, record, targets, guard, same=same)
    moved = await aliases.document(name, led)
    action = "alias.create" if before is None else "alias.move"
    await uow.audit.record(action, target(moved), _audited(before), _audited(moved), tenant_id=tenant_id)
    return moved


async def roll_back(
    uow: UnitOfWork, tenant_id: UUID, name: str, alias: str, *, seen: int | None = None
) -> AliasDocument:
    """Point an alias back to its previous targets; two rollbacks in a row change nothing. `seen` as in `move`.

    Raises `AdapterNotFound`, `AliasNotFound`, `AliasMoved`, `NoPreviousVersion`, `VersionNotReady`.
    """
    aliases = AliasRepository(uow.session, tenant_id)
    adapters = AdapterRepository(uow.session, tenant_id)
    adapter = await adapters.locked(name)
    record = await aliases.existing(adapter, alias)
    _require_seen(name, alias, record.generation, seen)
    before = await aliases.document(name, record)
    targets = before.previous_targets
    if not targets:
        raise NoPreviousVersion(f"{name}:{alias} has been where it is now from its beginning")
    for version in targets:
        await adapters.check_ready(adapter, version)
    moved = await aliases.document(name, await aliases.lead(adapter, alias, record, targets))
    await uow.audit.record(
        "alias.rollback", target(moved), _audited(before), _audited(moved), tenant_id=tenant_id
    )
    return moved


async def delete(
    uow: UnitOfWork, tenant_id: UUID, name: str, alias: str, *, seen: int | None = None
) -> AliasDocument:
    """Delete an alias and return its last state. `seen` as in `move`.

    Raises `AdapterNotFound`, `AliasNotFound`, `AliasMoved`, `InUse` for one with a gate.
    """
    aliases = AliasRepository(uow.session, tenant_id)
    adapter = await AdapterRepository(uow.session, tenant_id).locked(name)
    record = await aliases.existing(adapter, alias)
    _require_seen(name, alias, record.generation, seen)
    last = await aliases.document(name, record)
    if await uow.session.get(AliasGate, (adapter.id, alias)) is not None:
        raise InUse(f"{name}:{alias} has a gate: delete that first")
    await uow.session.delete(record)
    await uow.session.flush()
    await uow.audit.record("alias.delete", target(last), _audited(last), tenant_id=tenant_id)
    return last


def _require_seen(name: str, alias: str, present: int, seen: int | None) -> None:
    if seen is not None and seen != present:
        raise AliasMoved(f"{name}:{alias} has moved since it was read")


def _audited(state: AliasDocument | None) -> dict[str, Any] | None:
    """Return what an audit entry has of an alias."""
    if state is None:
        return None
    guard = {} if state.guard is None else {"guard": state.guard.bounds.model_dump(exclude_none=True)}
    return {"targets": state.targets, **guard}


def target(alias: AliasDocument) -> str:
    """Return the alias's path in the audit log."""
    return f"adapters/{alias.name}/aliases/{alias.alias}"
