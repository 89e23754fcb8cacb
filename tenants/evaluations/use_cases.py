"""Use cases on suites and evaluations: add and delete a suite, start and cancel an evaluation, set and delete a gate.

Invariant: a suite is not deleted while a gate or an open evaluation needs it.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import delete, func, select

from loraplex.tenants.database import lock
from loraplex.tenants.errors import (
    CountReached,
    EvaluationEnded,
    GateNotFound,
    InUse,
    InvalidField,
    NameTaken,
    ScopeNotHeld,
    SuiteNotFound,
)
from loraplex.tenants.evaluations import queries
from loraplex.tenants.evaluations.records import (
    MAX_OPEN,
    MAX_SUITE_BYTES,
    MAX_SUITES,
    OPEN_STATES,
    EvaluationDocument,
    FoundSuite,
    GateDocument,
    SuiteDocument,
)
from loraplex.tenants.ids import uuid7
from loraplex.tenants.models import Adapter, AdapterVersion, AliasGate, Evaluation, EvaluationAnswer, Suite
from loraplex.tenants.names import ADAPTER_NAME, ADAPTER_RULE, check_pattern
from loraplex.tenants.registry.adapters import AdapterRepository
from loraplex.tenants.registry.aliases import AliasRepository
from loraplex.tenants.scopes import TENANT_ADMIN
from loraplex.tenants.unit_of_work import UnitOfWork

BASE: Final = "base"
"""What names the base model as a baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSuite:
    """A checked file. `content` is encrypted for `id`."""

    id: UUID
    name: str
    sha256: str
    cases: int
    size_bytes: int
    content: bytes
    base_digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvaluation:
    """`baseline`: a version's number, an alias of the adapter, or `base`; None for none. `base_digest`: of the served model."""

    version: int
    suite: FoundSuite
    baseline: int | str | None
    seed: int
    key_id: str
    address: str | None
    base_digest: str
    base_model: str


def profile_fields(version: AdapterVersion) -> dict[str, Any]:
    """Return what of a version's profile an evaluation's answers depend on."""
    return {name: getattr(version, name) for name in ("tool_style", "reasoning_style", "defaults")}


async def add_suite(uow: UnitOfWork, tenant_id: UUID | None, new: NewSuite) -> SuiteDocument:
    """Add a suite, for None one of the installation; the same file under the same name is there already.

    Raises `InvalidName`, `NameTaken`, `CountReached`.
    """
    check_pattern("suite", new.name, ADAPTER_NAME, ADAPTER_RULE)
    await lock(uow.session, f"suites:{tenant_id}")
    own = Suite.tenant_id == tenant_id if tenant_id is not None else Suite.tenant_id.is_(None)
    present = await uow.session.scalar(select(Suite).where(own, Suite.name == new.name))
    if present is not None:
        if (present.sha256, present.base_digest) == (new.sha256, new.base_digest):
            return SuiteDocument.model_validate(present)
        raise NameTaken(
            f"there is another suite {new.name}: a suite never changes, so give this one a name of its own"
        )
    sums = select(func.count(), func.coalesce(func.sum(Suite.size_bytes), 0)).where(own)
    count, size = (await uow.session.execute(sums)).one()
    if count >= MAX_SUITES or size + new.size_bytes > MAX_SUITE_BYTES:
        raise CountReached(
            "max_suites", f"at most {MAX_SUITES} suites of {MAX_SUITE_BYTES} bytes in all are kept"
        )
    row = Suite(tenant_id=tenant_id, created_by=uow.actor.name, **asdict(new))
    uow.session.add(row)
    await uow.session.flush()
    after = {"sha256": new.sha256, "cases": new.cases}
    await uow.audit.record("suite.create", f"suites/{new.name}", None, after, tenant_id=tenant_id)
    return SuiteDocument.model_validate(row)


async def delete_suite(uow: UnitOfWork, tenant_id: UUID | None, name: str) -> None:
    """Delete a suite; reports on it stay. Raises `SuiteNotFound`, `InUse`."""
    await lock(uow.session, f"suites:{tenant_id}")
    row = await queries.suite_row(uow.session, tenant_id, name)
    await lock(uow.session, f"suite:{row.id}")
    if row.tenant_id != tenant_id:
        raise SuiteNotFound(f"suite {name} is the installation's: only an operator deletes it")
    gate = select(Adapter.name, AliasGate.alias).join(Adapter, Adapter.id == AliasGate.adapter_id)
    running = select(Adapter.name, Evaluation.version).join(Adapter, Adapter.id == Evaluation.adapter_id)
    running = running.where(Evaluation.suite_id == row.id, Evaluation.state.in_(OPEN_STATES))
    for query, what in (
        (gate.where(AliasGate.suite_id == row.id), "the gate of {}:{}"),
        (running, "an evaluation of {}@{} that has not ended"),
    ):
        if found := (await uow.session.execute(query.limit(1))).first():
            raise InUse(f"{what.format(*found)} needs suite {name}")
    await uow.session.delete(row)
    await uow.session.flush()
    await uow.audit.record("suite.delete", f"suites/{name}", {"sha256": row.sha256}, tenant_id=tenant_id)


async def start(uow: UnitOfWork, tenant_id: UUID, name: str, new: NewEvaluation) -> EvaluationDocument:
    """Queue an evaluation of a ready version. Its requests are those of the key `key_id`.

    Raises `AdapterNotFound`, `VersionNotFound`, `VersionNotReady`, `InvalidField`, `CountReached`.
    """
    suite = new.suite
    await _keep_suite(uow, suite)
    if suite.base_digest not in (None, new.base_digest):
        raise InvalidField("suite", f"suite {suite.name} is for another base model, {suite.base_digest}")
    adapters = AdapterRepository(uow.session, tenant_id)
    adapter = await adapters.get(name)
    await adapters.check_ready(adapter, new.version)
    baseline = await _baseline_version(uow, tenant_id, name, new.baseline)
    if baseline == new.version:
        raise InvalidField(
            "baseline", f"{name}@{baseline} is the version itself: name another version, or {BASE!r}"
        )
    if baseline is not None:
        await adapters.check_ready(adapter, baseline)
    await lock(uow.session, f"evaluations:{tenant_id}")
    open_now = select(func.count()).where(
        Evaluation.tenant_id == tenant_id, Evaluation.state.in_(OPEN_STATES)
    )
    if (await uow.session.scalar(open_now) or 0) >= MAX_OPEN:
        raise CountReached(
            "max_evaluations", f"at most {MAX_OPEN} evaluations are queued or running; wait for one"
        )
    row = Evaluation(
        id=uuid7(),
        tenant_id=tenant_id,
        adapter_id=adapter.id,
        version=new.version,
        suite=suite.name,
        suite_id=suite.id,
        suite_sha256=suite.sha256,
        baseline=None
        if new.baseline is None
        else new.base_model
        if baseline is None
        else f"{name}@{baseline}",
        profile=profile_fields(await adapters.version_of(adapter, new.version)),
        seed=new.seed,
        total=suite.cases * (1 if new.baseline is None else 2),
        key_id=new.key_id,
        address=new.address,
        created_by=uow.actor.name,
    )
    uow.session.add(row)
    await uow.session.flush()
    after = {"suite": suite.name, "sha256": suite.sha256, "baseline": row.baseline, "seed": new.seed}
    target = f"adapters/{name}/versions/{new.version}/evaluations/{row.id}"
    await uow.audit.record("evaluation.start", target, None, after, tenant_id=tenant_id)
    return await queries.evaluation(uow.session, tenant_id, row.id)


async def cancel(uow: UnitOfWork, tenant_id: UUID, evaluation_id: UUID) -> EvaluationDocument:
    """End an open evaluation; the answer that is being made is charged. Raises `EvaluationNotFound`, `EvaluationEnded`."""
    before = await queries.evaluation(uow.session, tenant_id, evaluation_id)
    row = await uow.session.get_one(Evaluation, evaluation_id, with_for_update=True, populate_existing=True)
    if row.state not in OPEN_STATES:
        raise EvaluationEnded(f"evaluation {evaluation_id} is {row.state}")
    row.state, row.ended_at = "cancelled", datetime.now(UTC)
    await uow.session.flush()
    await uow.session.execute(delete(EvaluationAnswer).where(EvaluationAnswer.evaluation_id == row.id))
    target = f"adapters/{before.adapter}/versions/{before.version}/evaluations/{evaluation_id}"
    await uow.audit.record("evaluation.cancel", target, {"done": row.done}, tenant_id=tenant_id)
    return await queries.evaluation(uow.session, tenant_id, evaluation_id)


async def set_gate(
    uow: UnitOfWork,
    tenant_id: UUID,
    name: str,
    alias: str,
    suite: FoundSuite,
    min_pass: float,
    max_regression: float | None,
    *,
    scopes: Collection[str],
) -> GateDocument:
    """Set the gate of an alias: later moves to a new version need a report that keeps it. Where it points now stays.

    `scopes`: of the author. Raises `AdapterNotFound`, `AliasNotFound`, `SuiteNotFound`, and `ScopeNotHeld` for a change of a gate
    without `tenant:admin`.
    """
    await _keep_suite(uow, suite)
    adapter = await AdapterRepository(uow.session, tenant_id).locked(name)
    await AliasRepository(uow.session, tenant_id).existing(adapter, alias)
    present = await uow.session.get(AliasGate, (adapter.id, alias))
    before = None if present is None else _audited(present)
    if present is not None:
        _require_admin(scopes)
    gate = await uow.session.merge(
        AliasGate(
            adapter_id=adapter.id,
            alias=alias,
            tenant_id=tenant_id,
            suite=suite.name,
            suite_id=suite.id,
            suite_sha256=suite.sha256,
            min_pass=min_pass,
            max_regression=max_regression,
            changed_by=uow.actor.name,
            changed_at=datetime.now(UTC),
        )
    )
    await uow.session.flush()
    if before != _audited(gate):
        target = f"adapters/{name}/aliases/{alias}/gate"
        await uow.audit.record("alias.gate", target, before, _audited(gate), tenant_id=tenant_id)
    return GateDocument.model_validate(gate)


async def delete_gate(
    uow: UnitOfWork, tenant_id: UUID, name: str, alias: str, *, scopes: Collection[str]
) -> None:
    """Delete the gate of an alias. Raises `AdapterNotFound`, `GateNotFound`, `ScopeNotHeld`."""
    adapter = await AdapterRepository(uow.session, tenant_id).locked(name)
    gate = await uow.session.get(AliasGate, (adapter.id, alias))
    if gate is None:
        raise GateNotFound(f"{name}:{alias[:80]} has no gate")
    _require_admin(scopes)
    await uow.session.delete(gate)
    await uow.session.flush()
    target = f"adapters/{name}/aliases/{alias}/gate"
    await uow.audit.record("alias.gate.delete", target, _audited(gate), tenant_id=tenant_id)


def _audited(gate: AliasGate) -> dict[str, object]:
    names = ("suite", "suite_sha256", "min_pass", "max_regression")
    return {name: getattr(gate, name) for name in names}


async def _keep_suite(uow: UnitOfWork, suite: FoundSuite) -> None:
    """Let no one delete the suite before this commits. Raises `SuiteNotFound` for one that is deleted."""
    if suite.id is not None:
        await lock(uow.session, f"suite:{suite.id}")
        if await uow.session.scalar(select(Suite.id).where(Suite.id == suite.id)) is None:
            raise SuiteNotFound(f"no suite {suite.name!r}")


def _require_admin(scopes: Collection[str]) -> None:
    """Raise `ScopeNotHeld` unless an admin changes a gate that is set."""
    if TENANT_ADMIN not in scopes:
        raise ScopeNotHeld(f"changing a gate that is set takes the scope `{TENANT_ADMIN}`")


async def _baseline_version(
    uow: UnitOfWork, tenant_id: UUID, name: str, baseline: int | str | None
) -> int | None:
    """Return the version that a baseline names now; None for none and for the base model. Raises `InvalidField`."""
    if baseline is None or baseline == BASE or isinstance(baseline, int):
        return baseline if isinstance(baseline, int) else None
    aliases = await AliasRepository(uow.session, tenant_id).list(name)
    found = next((each for each in aliases if each.alias == baseline), None)
    if found is None:
        allowed = ", ".join([*(each.alias for each in aliases[:20]), BASE])
        raise InvalidField(
            "baseline", f"{baseline[:80]!r} is no alias of {name}: a version's number, or one of {allowed}"
        )
    return found.main_version
