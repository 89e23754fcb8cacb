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
            if refusal is None:
                continue
            if override is None:
                raise refusal
            if TENANT_ADMIN not in override.scopes:
                raise ScopeNotHeld(f"overriding a gate takes a key with the scope `{TENANT_ADMIN}`")
            noted = {"version": version, "reason": override.reason, "refused": str(refusal)}
            noted["evaluation"] = None if refusal.evaluation is None else str(refusal.evaluation)
            place = f"adapters/{name}/aliases/{alias}/gate"
            await uow.audit.record("alias.gate.override", place, None, noted, tenant_id=tenant_id)
    return await aliases.move(uow, tenant_id, name, alias, targets, guard=guard, seen=seen)


def _refusal(
    gate: AliasGate, version: int, reports: list[EvaluationDocument], main: int, fingerprint: str | None
) -> GateFailed | None:
    """Return why a gate refuses a version; None if the version's newest report keeps it."""
    if fingerprint is not None:
        reports = [each for each in reports if each.system_fingerprint == fingerprint]
    if gate.max_regression is not None:
        reports = [
            each for each in reports if each.baseline is not None and each.baseline.endswith(f"@{main}")
        ]
    if not reports:
        against = "" if gate.max_regression is None else f" against v{main}"
        missing = (
            f"no evaluation of v{version} on suite {gate.suite}{against} has completed on the present engine"
        )
        return GateFailed(f"the gate of {gate.alias} needs one: {missing}", None)
    report = reports[0]
    rate, on = report.pass_rate or 0.0, f"of v{version} on suite {gate.suite}"
    if rate < gate.min_pass:
        reason = f"the pass rate {on} is {rate:.4g}; the gate of {gate.alias} needs {gate.min_pass:g}"
        return GateFailed(reason, report.id)
    if gate.max_regression is not None and report.regression > gate.max_regression:
        reason = f"the pass rate {on} is {report.regression:.4g} below that of v{main}"
        return GateFailed(f"{reason}; the gate of {gate.alias} allows {gate.max_regression:g}", report.id)
    return None
