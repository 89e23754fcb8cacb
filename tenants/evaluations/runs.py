"""The running of evaluations, seen by a gateway that runs them: claim, keep answers, end.

Invariant: an evaluation has one runner: what another one writes after its claim has passed on is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final
from uuid import UUID, uuid4

from sqlalchemy import delete, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.database import lock
from loraplex.tenants.evaluations.records import OPEN_STATES
from loraplex.tenants.models import Adapter, Evaluation, EvaluationAnswer, Suite

LEASE: Final = timedelta(seconds=60)
CLAIM: Final = text("""
UPDATE evaluations SET state = 'running', claim = :claim, claimed_until = now() + :lease
WHERE id = (
    SELECT id FROM evaluations AS open
    WHERE state IN ('queued', 'running') AND coalesce(claimed_until, '-infinity') < now() AND NOT EXISTS (
        SELECT FROM evaluations AS other WHERE other.tenant_id = open.tenant_id AND other.state = 'running'
            AND other.claimed_until >= now()
    )
    ORDER BY claimed_until NULLS FIRST, created_at LIMIT 1 FOR UPDATE SKIP LOCKED
) RETURNING id
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRun:
    """A claimed evaluation. `model` and `baseline` are names as requests have them; `content` of the suite is encrypted."""

    id: UUID
    claim: UUID
    tenant_id: UUID
    key_id: str
    address: str | None
    model: str
    baseline: str | None
    seed: int
    suite: str
    suite_sha256: str
    suite_id: UUID | None
    suite_tenant: UUID | None
    content: bytes | None


async def claim_next(session: AsyncSession) -> EvaluationRun | None:
    """Claim the open evaluation that waits longest for a runner, of a tenant without a running one. For an operator's session."""
    await lock(session, "evaluations")  # Or two gateways would each begin one of a tenant.
    claim = uuid4()
    found = await session.scalar(CLAIM, {"claim": claim, "lease": LEASE})
    if found is None:
        return None
    query = (
        select(Evaluation, Adapter.name, Suite.tenant_id, Suite.content)
        .join(Adapter, Adapter.id == Evaluation.adapter_id)
        .outerjoin(Suite, Suite.id == Evaluation.suite_id)
        .where(Evaluation.id == found)
    )
    row, name, suite_tenant, content = (await session.execute(query)).one()
    names = ("id", "tenant_id", "key_id", "address", "baseline", "seed", "suite", "suite_sha256", "suite_id")
    own = {each: getattr(row, each) for each in names}
    model = f"{name}@{row.version}"
    return EvaluationRun(claim=claim, model=model, suite_tenant=suite_tenant, content=content, **own)


async def renew(session: AsyncSession, run: EvaluationRun, done: int | None = None) -> bool:
    """Renew the claim, and count the answers; False if the evaluation is cancelled, deleted, or another gateway's."""
    statement = _own(run).values(
        claimed_until=func.now() + LEASE, done=Evaluation.done if done is None else done
    )
    return await session.scalar(statement.returning(Evaluation.id)) is not None


async def release(session: AsyncSession, run: EvaluationRun) -> None:
    """End the claim: those that waited longer are claimed first."""
    await session.execute(_own(run).values(claimed_until=func.now(), claim=None))


async def keep_answer(
    session: AsyncSession, run: EvaluationRun, side: int, place: int, result: bytes
) -> None:
    """Keep an encrypted result, in the transaction of its `renew`."""
    row = {
        "evaluation_id": run.id,
        "side": side,
        "place": place,
        "tenant_id": run.tenant_id,
        "result": result,
    }
    session.add(EvaluationAnswer(**row))
    await session.flush()


async def kept_answers(session: AsyncSession, run: EvaluationRun) -> tuple[list[bytes], list[bytes]]:
    """Return the encrypted results of the version and of the baseline, in the order of the cases."""
    query = (
        select(EvaluationAnswer)
        .where(EvaluationAnswer.evaluation_id == run.id)
        .order_by(EvaluationAnswer.place)
    )
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for row in await session.scalars(query):
        sides[row.side].append(row.result)
    return sides


async def end(session: AsyncSession, run: EvaluationRun, values: Mapping[str, Any]) -> None:
    """End an evaluation with what its row has then; nothing if it is not this runner's any more."""
    ended = _own(run).values(**values, ended_at=func.now(), claimed_until=None, claim=None)
    if await session.scalar(ended.returning(Evaluation.id)) is not None:
        await session.execute(delete(EvaluationAnswer).where(EvaluationAnswer.evaluation_id == run.id))


def _own(run: EvaluationRun) -> Any:
    own = (Evaluation.id == run.id, Evaluation.claim == run.claim, Evaluation.state.in_(OPEN_STATES))
    return update(Evaluation).where(*own).execution_options(synchronize_session=False)
