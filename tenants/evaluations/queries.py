"""Reads suites, evaluations and gates of one tenant, and the installation's suites."""

from collections.abc import Sequence
from uuid import UUID

from sqlalchemy import Row, Select, select
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import undefer

from loraplex.tenants.errors import EvaluationNotFound, GateNotFound, SuiteNotFound
from loraplex.tenants.evaluations.records import EvaluationDocument, FoundSuite, GateDocument, SuiteDocument
from loraplex.tenants.models import Adapter, AliasGate, Evaluation, Suite
from loraplex.tenants.names import ADAPTER_NAME, is_name
from loraplex.tenants.pages import Slice
from loraplex.tenants.registry.adapters import AdapterRepository


async def suites(session: AsyncSession, tenant_id: UUID | None, part: Slice[str]) -> list[SuiteDocument]:
    """Return suites by name: a tenant's and the installation's; for None the installation's."""
    query = select(Suite).where(Suite.tenant_id.is_(None) | (Suite.tenant_id == tenant_id))
    # A tenant's own one goes before the installation's of the same name.
    query = query.ext(distinct_on(Suite.name)).order_by(Suite.name, Suite.tenant_id.nulls_last())
    if part.after is not None:
        query = query.where(Suite.name > part.after)
    return [SuiteDocument.model_validate(row) for row in await session.scalars(query.limit(part.fetch))]


async def suite_row(session: AsyncSession, tenant_id: UUID | None, name: str) -> Suite:
    """Return the suite of this name. Raises `SuiteNotFound`."""
    query = select(Suite).where(
        Suite.name == name, Suite.tenant_id.is_(None) | (Suite.tenant_id == tenant_id)
    )
    query = query.order_by(Suite.tenant_id.nulls_last()).limit(1)
    found = await session.scalar(query) if is_name(name, ADAPTER_NAME) else None
    if found is None:
        raise SuiteNotFound(f"no suite {name[:80]!r}")
    return found


async def suite(session: AsyncSession, tenant_id: UUID | None, name: str) -> SuiteDocument:
    """Return one suite. Raises `SuiteNotFound`."""
    return SuiteDocument.model_validate(await suite_row(session, tenant_id, name))


async def suite_content(session: AsyncSession, tenant_id: UUID | None, name: str) -> tuple[Suite, bytes]:
    """Return a suite and its encrypted content. Raises `SuiteNotFound`."""
    row = await suite_row(session, tenant_id, name)
    return row, await session.scalar(select(Suite.content).where(Suite.id == row.id)) or b""


async def find_suite(session: AsyncSession, tenant_id: UUID, name: str, built_in: FoundSuite) -> FoundSuite:
    """Return the suite that a tenant names, which may be the built-in one. Raises `SuiteNotFound`."""
    if name == built_in.name:
        return built_in
    row = await suite_row(session, tenant_id, name)
    return FoundSuite(row.name, row.sha256, row.cases, row.id, row.base_digest)


async def evaluations(
    session: AsyncSession, tenant_id: UUID, name: str, version: int | None, part: Slice[UUID]
) -> list[EvaluationDocument]:
    """Return evaluations of an adapter, or of one of its versions, the newest first. Raises `AdapterNotFound`."""
    adapter = await AdapterRepository(session, tenant_id).get(name)
    query = _evaluations(tenant_id).where(Evaluation.adapter_id == adapter.id)
    if version is not None:
        query = query.where(Evaluation.version == version)
    if part.after is not None:
        query = query.where(Evaluation.id < part.after)
    rows = await session.execute(query.order_by(Evaluation.id.desc()).limit(part.fetch))
    return [document(row) for row in rows]


async def evaluation(session: AsyncSession, tenant_id: UUID, evaluation_id: UUID) -> EvaluationDocument:
    """Return one evaluation. Raises `EvaluationNotFound`."""
    return document(await _one(session, _evaluations(tenant_id), evaluation_id))


async def report(
    session: AsyncSession, tenant_id: UUID, evaluation_id: UUID
) -> tuple[EvaluationDocument, bytes]:
    """Return an evaluation and its encrypted report. Raises `EvaluationNotFound`, also for one that is not completed."""
    row = await _one(session, _evaluations(tenant_id).options(undefer(Evaluation.report)), evaluation_id)
    content: bytes | None = row.Evaluation.report
    if content is None:
        raise EvaluationNotFound(f"evaluation {evaluation_id} has no report: it is {row.Evaluation.state}")
    return document(row), content


async def gates(session: AsyncSession, tenant_id: UUID, name: str) -> dict[str, GateDocument]:
    """Return the gates of an adapter by alias. Raises `AdapterNotFound`."""
    adapter = await AdapterRepository(session, tenant_id).get(name)
    rows = await session.scalars(select(AliasGate).where(AliasGate.adapter_id == adapter.id))
    return {row.alias: GateDocument.model_validate(row) for row in rows}


async def gate(session: AsyncSession, tenant_id: UUID, name: str, alias: str) -> GateDocument:
    """Return the gate of an alias. Raises `AdapterNotFound`, `GateNotFound`."""
    found = (await gates(session, tenant_id, name)).get(alias)
    if found is None:
        raise GateNotFound(f"{name}:{alias[:80]} has no gate")
    return found


def document(row: Row[Evaluation, str]) -> EvaluationDocument:
    """Return the evaluation of a row, which comes with the adapter's name."""
    evaluation, name = row
    fields = {
        each: getattr(evaluation, each) for each in EvaluationDocument.model_fields if each != "adapter"
    }
    return EvaluationDocument(adapter=name, **fields)


def _evaluations(tenant_id: UUID) -> Select[Evaluation, str]:
    joined = select(Evaluation, Adapter.name).join(Adapter, Adapter.id == Evaluation.adapter_id)
    return joined.where(Evaluation.tenant_id == tenant_id)


async def _one(
    session: AsyncSession, query: Select[Evaluation, str], evaluation_id: UUID
) -> Row[Evaluation, str]:
    row = (await session.execute(query.where(Evaluation.id == evaluation_id))).one_or_none()
    if row is None:
        raise EvaluationNotFound(f"no evaluation {evaluation_id}")
    return row


async def latest(
    session: AsyncSession, adapter: Adapter, versions: Sequence[int], suite_sha256: str
) -> dict[int, list[EvaluationDocument]]:
    """Return the completed evaluations of versions on a suite, the newest first."""
    query = _evaluations(adapter.tenant_id).where(
        *(Evaluation.adapter_id == adapter.id, Evaluation.version.in_(versions)),
        *(Evaluation.suite_sha256 == suite_sha256, Evaluation.state == "completed"),
    )
    found: dict[int, list[EvaluationDocument]] = {version: [] for version in versions}
    for row in await session.execute(query.order_by(Evaluation.id.desc())):
        found[row.Evaluation.version].append(document(row))
    return found
