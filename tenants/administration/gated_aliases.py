"""Moves of aliases through their gates. Invariant: no version gets requests by a gated alias without a report that keeps the
gate, or a reason of an admin in the audit log.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from uuid import UUID

from loraplex.tenants.canaries.records import GuardBounds
from loraplex.tenants.errors import GateFailed, ScopeNotHeld
from loraplex.tenants.evaluations.queries import latest
from loraplex.tenants.evaluations.records import EvaluationDocument
from loraplex.tenants.models import AliasGate
from loraplex.tenants.names import check_alias_name
from loraplex.tenants.registry import use_cases as aliases
from loraplex.tenants.registry.adapters import AdapterRepository
from loraplex.tenants.registry.aliases import AliasRepository, check_targets
from loraplex.tenants.registry.records import AliasDocument
from loraplex.tenants.scopes import TENANT_ADMIN
from loraplex.tenants.unit_of_work import UnitOfWork


@dataclass(frozen=True, slots=True)
class GateOverride:
    """Why an alias moves although its gate refuses that, and the scopes of who says so."""

    reason: str
    scopes: Collection[str]


async def move(
    uow: UnitOfWork,
    tenant_id: UUID,
    name: str,
    alias: str,
    targets: Mapping[int, int],
    *,
    guard: GuardBounds | None = None,
    seen: int | None = None,
    override: GateOverride | None = None,
    fingerprint: str | None = None,
) -> AliasDocument:
    """Move an alias as `registry.use_cases.move` does, through its gate. `fingerprint`: of the engine that reports must be from.

    Raises what that raises, `GateFailed`, and `ScopeNotHeld` for an override without `tenant:admin`.
    """
    check_targets(targets)
    adapter = await AdapterRepository(uow.session, tenant_id).locked(name)
    gate = await uow.session.get(AliasGate, (adapter.id, check_alias_name(alias)))
    if gate is not None:
        present = await AliasRepository(uow.session, tenant_id).get(name, alias)
        new = sorted(targets.keys() - present.targets.keys())
        found = await latest(uow.session, adapter, new, gate.suite_sha256)
        for version in new:
            refusal = _refusal(gate, version, found[version], present.main_version, fingerprint)
            if refusal is not None and override is None:
                raise GateFailed(f"{name}:{alias} does not move to v{version}: {refusal[0]}", refusal[1])
            if refusal is not None and override is not None:
                await _note_override(uow, tenant_id, f"{name}:{alias}", version, refusal, override)
    return await aliases.move(uow, tenant_id, name, alias, targets, guard=guard, seen=seen)


def _refusal(
    gate: AliasGate, version: int, reports: list[EvaluationDocument], main: int, fingerprint: str | None
) -> tuple[str, UUID | None] | None:
    """Return why a gate refuses a version, and the report that says so; None if its newest report keeps the gate."""
    if fingerprint is not None:
        reports = [each for each in reports if each.system_fingerprint == fingerprint]
    if gate.max_regression is not None:
        reports = [
            each for each in reports if each.baseline is not None and each.baseline.endswith(f"@{main}")
        ]
    if not reports:
        against = "" if gate.max_regression is None else f" against v{main}"
        return f"no evaluation of it on suite {gate.suite}{against} has completed on the present engine", None
    report = reports[0]
    rate = report.pass_rate or 0.0
    if rate < gate.min_pass:
        return (
            f"its pass rate on suite {gate.suite} is {rate:.4g}; the gate needs {gate.min_pass:g}",
            report.id,
        )
    if gate.max_regression is not None and report.regression > gate.max_regression:
        bound = f"the gate allows {gate.max_regression:g}"
        return (
            f"it passes {report.regression:.4g} less of suite {gate.suite} than v{main}; {bound}",
            report.id,
        )
    return None


async def _note_override(
    uow: UnitOfWork,
    tenant_id: UUID,
    place: str,
    version: int,
    refusal: tuple[str, UUID | None],
    override: GateOverride,
) -> None:
    if TENANT_ADMIN not in override.scopes:
        raise ScopeNotHeld(f"overriding the gate of {place} takes a key with the scope `{TENANT_ADMIN}`")
    name, _, alias = place.partition(":")
    noted = {"version": version, "reason": override.reason, "refused": refusal[0]}
    noted |= {} if refusal[1] is None else {"evaluation": str(refusal[1])}
    target = f"adapters/{name}/aliases/{alias}/gate"
    await uow.audit.record("alias.gate.override", target, None, noted, tenant_id=tenant_id)
