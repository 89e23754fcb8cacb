"""Moves of aliases through their gates.

Invariant: no version gets more requests by a gated alias without a report that keeps the gate, or a reason of an admin in the
audit log; but for the oldest version that the alias has, and what it goes back to.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple
from uuid import UUID

from loraplex.tenants.canaries.records import GuardBounds
from loraplex.tenants.errors import GateFailed, InvalidField, ScopeNotHeld
from loraplex.tenants.evaluations.queries import latest
from loraplex.tenants.evaluations.records import EvaluationDocument
from loraplex.tenants.evaluations.use_cases import profile_fields
from loraplex.tenants.models import Adapter, AliasGate
from loraplex.tenants.names import check_alias_name
from loraplex.tenants.registry import use_cases as aliases
from loraplex.tenants.registry.adapters import AdapterRepository
from loraplex.tenants.registry.aliases import AliasRepository, check_targets
from loraplex.tenants.registry.records import AliasDocument
from loraplex.tenants.scopes import TENANT_ADMIN
from loraplex.tenants.unit_of_work import UnitOfWork

MAX_REASON: Final = 500


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
    if override is not None and not 1 <= len(override.reason.strip()) <= MAX_REASON:
        raise InvalidField(
            "override", f"the reason for passing a gate must have 1 to {MAX_REASON} characters"
        )
    gated = await _gated(uow, tenant_id, name, alias)
    if gated is not None:
        grown = gated.grown(targets) - {min(gated.present.targets)}
        await _pass(uow, tenant_id, gated, grown, fingerprint, override)
    return await aliases.move(uow, tenant_id, name, alias, targets, guard=guard, seen=seen)


async def roll_back(
    uow: UnitOfWork,
    tenant_id: UUID,
    name: str,
    alias: str,
    *,
    seen: int | None = None,
    fingerprint: str | None = None,
) -> AliasDocument:
    """Roll an alias back as `registry.use_cases.roll_back` does. Versions older than those it has now pass without a report.

    Raises what that raises, and `GateFailed`: two rollbacks in a row lead to the newer version again.
    """
    gated = await _gated(uow, tenant_id, name, alias)
    if gated is not None:
        grown = gated.grown(gated.present.previous_targets)
        newer = {version for version in grown if version > min(gated.present.targets)}
        await _pass(uow, tenant_id, gated, newer, fingerprint, None)
    return await aliases.roll_back(uow, tenant_id, name, alias, seen=seen)


class _Gated(NamedTuple):
    """A gated alias as it is now. Its adapter is locked."""

    adapter: Adapter
    gate: AliasGate
    present: AliasDocument

    def grown(self, targets: Mapping[int, int]) -> set[int]:
        """Return the versions that get more requests than now."""
        return {each for each, weight in targets.items() if weight > self.present.targets.get(each, 0)}


async def _gated(uow: UnitOfWork, tenant_id: UUID, name: str, alias: str) -> _Gated | None:
    """Return a gated alias; None for one without a gate."""
    adapter = await AdapterRepository(uow.session, tenant_id).locked(name)
    gate = await uow.session.get(AliasGate, (adapter.id, check_alias_name(alias)))
    if gate is None:
        return None
    return _Gated(adapter, gate, await AliasRepository(uow.session, tenant_id).get(name, alias))


async def _pass(
    uow: UnitOfWork,
    tenant_id: UUID,
    gated: _Gated,
    versions: Collection[int],
    fingerprint: str | None,
    override: GateOverride | None,
) -> None:
    """Let versions pass the gate of an alias. Raises `GateFailed`, `ScopeNotHeld`."""
    adapters, (adapter, gate, present) = AdapterRepository(uow.session, tenant_id), gated
    found = await latest(uow.session, adapter, sorted(versions), gate.suite_sha256)
    for version, reports in found.items():
        profile = profile_fields(await adapters.version_of(adapter, version))
        reports = [
            each
            for each in reports
            if each.profile == profile and fingerprint in (None, each.system_fingerprint)
        ]
        compared = None
        if gate.max_regression is not None:
            main = await adapters.version_of(adapter, _replaced(present, version))
            # None can be made against a version that is not served any more.
            compared = main.version if main.state == "ready" else None
        refusal = _refusal(gate, present.name, version, reports, compared)
        if refusal is None:
            continue
        if override is None:
            raise refusal
        if TENANT_ADMIN not in override.scopes:
            raise ScopeNotHeld(f"passing a gate takes a key with the scope `{TENANT_ADMIN}`")
        noted = {"version": version, "reason": override.reason.strip(), "refused": str(refusal)}
        noted["evaluation"] = None if refusal.evaluation is None else str(refusal.evaluation)
        place = f"adapters/{present.name}/aliases/{present.alias}/gate"
        await uow.audit.record("alias.gate.override", place, None, noted, tenant_id=tenant_id)


def _replaced(present: AliasDocument, version: int) -> int:
    """Return the version with the largest share beside `version`."""
    others = [each for each in present.split if each.version != version]
    return max(others, key=lambda each: (each.weight, each.version)).version


def _refusal(
    gate: AliasGate, name: str, version: int, reports: list[EvaluationDocument], compared: int | None
) -> GateFailed | None:
    """Return why a gate refuses a version; None if the newest of its reports keeps it. `compared`: with which version."""
    suite = f"suite {gate.suite} ({gate.suite_sha256[:12]})"
    if compared is not None:
        reports = [each for each in reports if each.baseline == f"{name}@{compared}"]
    if not reports:
        against = "" if compared is None else f" against v{compared}"
        missing = f"no evaluation of v{version} on {suite}{against} has completed"
        reason = f"the gate of {gate.alias} needs one: {missing} on the present engine, with its profile"
        return GateFailed(reason, None, version)
    report = reports[0]
    rate, on = report.pass_rate or 0.0, f"of v{version} on {suite}"
    if rate < gate.min_pass:
        reason = f"the pass rate {on} is {rate:.4g}; the gate of {gate.alias} needs {gate.min_pass:g}"
        return GateFailed(reason, report.id, version)
    if compared is not None and report.regression > (gate.max_regression or 0.0):
        reason = f"the pass rate {on} is {report.regression:.4g} below that of v{compared}"
        reason += f"; the gate of {gate.alias} allows {gate.max_regression:g}"
        return GateFailed(reason, report.id, version)
    return None
