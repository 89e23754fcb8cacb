"""Use cases on aliases: move, roll back, delete.

Invariant: a move that changes no target writes no audit entry.
"""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from loraplex.tenants.registry.aliases import AliasRepository
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
    aliases = AliasRepository(uow.session, tenant_id)
    before = await aliases.generation(name, alias) if seen is None else seen
    state = await aliases.set(name, alias, targets, before)
    if state.revision != before:
        action = "alias.create" if before == ABSENT else "alias.move"
        await uow.audit.record(action, target(state), *_moved(state), tenant_id=tenant_id)
    return state


async def roll_back(
    uow: UnitOfWork, tenant_id: UUID, name: str, alias: str, *, seen: int | None = None
) -> AliasDocument:
    """Point an alias back to its previous targets; two rollbacks in a row change nothing. `seen` as in `move`.

    Raises `AdapterNotFound`, `AliasNotFound`, `AliasMoved`, `NoPreviousVersion`, `VersionNotReady`.
    """
    state = await AliasRepository(uow.session, tenant_id).rollback(name, alias, seen)
    await uow.audit.record("alias.rollback", target(state), *_moved(state), tenant_id=tenant_id)
    return state


async def delete(
    uow: UnitOfWork, tenant_id: UUID, name: str, alias: str, *, seen: int | None = None
) -> AliasDocument:
    """Delete an alias and return its last state. `seen` as in `move`.

    Raises `AdapterNotFound`, `AliasNotFound`, `AliasMoved`.
    """
    last = await AliasRepository(uow.session, tenant_id).delete(name, alias, seen)
    before = {"targets": last.targets}
    await uow.audit.record("alias.delete", target(last), before, tenant_id=tenant_id)
    return last


def _moved(state: AliasDocument) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return `before` and `after` of the audit entry."""
    before = None if state.previous is None else {"targets": state.previous_targets}
    return before, {"targets": state.targets}


def target(alias: AliasDocument) -> str:
    """Return the alias's path in the audit log."""
    return f"adapters/{alias.name}/aliases/{alias.alias}"
