"""Use cases on aliases: move, roll back, delete.

Invariant: a move that changes no target writes no audit entry.
"""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from loraplex.tenants.errors import AliasMoved, NoPreviousVersion
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
    seen: int | None = None,
) -> AliasDocument:
    """Point an alias to ready versions (version -> weight in percent), and create it if there is none.

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
    if before is not None and before.targets == targets:
        return before
    moved = await aliases.document(name, await aliases.lead(adapter, alias, record, targets))
    action = "alias.create" if before is None else "alias.move"
    await uow.audit.record(action, target(moved), *_moved(moved), tenant_id=tenant_id)
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
    targets = (await aliases.document(name, record)).previous_targets
    if not targets:
        raise NoPreviousVersion(f"{name}:{alias} has been where it is now from its beginning")
    for version in targets:
        await adapters.check_ready(adapter, version)
    moved = await aliases.document(name, await aliases.lead(adapter, alias, record, targets))
    await uow.audit.record("alias.rollback", target(moved), *_moved(moved), tenant_id=tenant_id)
    return moved


async def delete(
    uow: UnitOfWork, tenant_id: UUID, name: str, alias: str, *, seen: int | None = None
) -> AliasDocument:
    """Delete an alias and return its last state. `seen` as in `move`.

    Raises `AdapterNotFound`, `AliasNotFound`, `AliasMoved`.
    """
    aliases = AliasRepository(uow.session, tenant_id)
    adapter = await AdapterRepository(uow.session, tenant_id).locked(name)
    record = await aliases.existing(adapter, alias)
    _require_seen(name, alias, record.generation, seen)
    last = await aliases.document(name, record)
    await uow.session.delete(record)
    await uow.session.flush()
    before = {"targets": last.targets}
    await uow.audit.record("alias.delete", target(last), before, tenant_id=tenant_id)
    return last


def _require_seen(name: str, alias: str, present: int, seen: int | None) -> None:
    if seen is not None and seen != present:
        raise AliasMoved(f"{name}:{alias} has moved since it was read")


def _moved(state: AliasDocument) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return `before` and `after` of the audit entry."""
    before = None if state.previous is None else {"targets": state.previous_targets}
    return before, {"targets": state.targets}


def target(alias: AliasDocument) -> str:
    """Return the alias's path in the audit log."""
    return f"adapters/{alias.name}/aliases/{alias.alias}"
