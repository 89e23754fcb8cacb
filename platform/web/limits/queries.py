"""Limits with their use, why a request was refused, and crossed budgets, as the API answers them.

Invariant: what PostgreSQL keeps is read without the counters, so that limits are shown while these do not answer.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, TypeAlias
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.web.console.limit_units import Unit, unit_of
from loraplex.tenants.admission.controller import AdmissionController
from loraplex.tenants.audit_queries import last_authors
from loraplex.tenants.counters.counter_replies import Explanation, LimitUse
from loraplex.tenants.errors import RefusalNotFound, StoreUnavailable
from loraplex.tenants.quotas.delegated_quotas import QuotaRepository, QuotaState
from loraplex.tenants.quotas.limits import COUNTED, MAXIMA, Level, QuotaLimits
from loraplex.tenants.quotas.threshold_events import quota_events

SUBJECTS: Final = 100
"""Subjects with limits that a page shows; the API has all."""
NEAREST: Final = 4
EVENTS: Final = 20
CHANGED: Final = "quotas.change"
Limits: TypeAlias = QuotaLimits
"""All limits of a subject, as a change sets them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitState:
    """One limit of one subject. Money in micro-units. `used` and `reserved` are None while the counters do not answer.

    `level` and `subject` say whose limit it is; `subject` is the name of the tenant, key or adapter.
    """

    level: Level
    subject: str
    name: str
    limit: int
    used: int | None
    reserved: int | None
    resets_at: datetime | None

    @property
    def unit(self) -> Unit:
        return unit_of(self.name)

    @property
    def taken(self) -> int:
        """What is used or reserved."""
        return (self.used or 0) + (self.reserved or 0)

    @property
    def nearness(self) -> tuple[bool, int]:
        """Orders limits by how near they are: parts of a million that are taken; a limit of zero is the nearest."""
        return self.limit == 0, 0 if self.limit == 0 else self.taken * 1_000_000 // self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedSubject:
    """A tenant, key or adapter with the limits it has. `id`: the key's public id, else its name. `set_by` is None where the
    audit log does not say it any more.
    """

    level: Level
    id: str
    name: str
    revision: int
    limits: tuple[LimitState, ...]
    set_by: str | None
    set_at: datetime | None


@dataclass(frozen=True, slots=True)
class StoredLimits:
    """What PostgreSQL knows of a tenant's limits; `states` are their subjects as the counters ask for them."""

    states: Sequence[QuotaState]
    subjects: tuple[LimitedSubject, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EditedLimits:
    """The limits of one key or adapter, and above them those of the tenant, by their names; None is no limit."""

    level: Level
    id: str
    name: str
    revision: int
    limits: Mapping[str, int | None]
    bounds: Mapping[str, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossed:
    """The use of a budget crossed `threshold` percent of its limit. `name` is None when the key or adapter is gone."""

    at: datetime
    level: str
    name: str | None
    limit_name: str
    period: str
    threshold: int
    used: int
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitDecision:
    """One limit as the request found it. None where it was unknown; money in micro-units."""

    level: Level
    name: str
    limit: int
    used: int | None
    reserved: int | None
    asked: int
    passed: bool
    retry_after_s: float | None
    known: bool

    @property
    def unit(self) -> Unit:
        return unit_of(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Every limit that was looked at for a refused request. `degraded`: counted by one gateway's share."""

    request_id: str
    at: datetime
    degraded: bool
    decisions: tuple[LimitDecision, ...]


async def stored(session: AsyncSession, tenant_id: UUID) -> StoredLimits:
    """Read the limits of the tenant, of its keys and of its adapters, at most `SUBJECTS` of them."""
    repository = QuotaRepository(session, tenant_id)
    states = await repository.page(None, SUBJECTS)
    names = await repository.key_names([state.name for state in states if state.level in ("key", "group")])
    authors = await last_authors(session, tenant_id, CHANGED, {_target(state) for state in states})
    subjects = []
    for state in states:
        author = authors.get(_target(state))
        subject = LimitedSubject(
            level=state.level,
            id=state.name,
            name=names.get(state.name, state.name) if state.level in ("key", "group") else state.name,
            revision=state.revision,
            limits=tuple(_limits(state, names.get(state.name, state.name))),
            set_by=None if author is None else author.actor,
            set_at=None if author is None else author.at,
        )
        subjects.append(subject)
    resources = [
        LimitState(
            level="tenant",
            subject=subjects[0].name,
            name=name,
            limit=each.limit,
            used=each.used,
            reserved=0,
            resets_at=None,
        )
        for name, each in (await repository.resources(states[0].limits)).items()
    ]
    tenant = replace(subjects[0], limits=(*subjects[0].limits, *resources))
    return StoredLimits(states, (tenant, *subjects[1:]))


async def with_use(
    controller: AdmissionController, tenant_id: UUID, found: StoredLimits
) -> tuple[LimitedSubject, ...] | None:
    """Ask the counters for the use of these limits; None while they do not answer."""
    try:
        uses = await controller.quotas(tenant_id, [state.subject for state in found.states])
    except StoreUnavailable:
        return None
    by_place: dict[tuple[UUID, str], LimitUse] = {(use.subject_id, use.name): use for use in uses}
    return tuple(
        replace(subject, limits=tuple(_counted(each, state.subject_id, by_place) for each in subject.limits))
        for state, subject in zip(found.states, found.subjects, strict=True)
    )


def nearest(subjects: Iterable[LimitedSubject]) -> tuple[LimitState, ...]:
    """The limits of which the largest part is taken, the nearest first."""
    every = [each for subject in subjects for each in subject.limits if each.used is not None]
    return tuple(sorted(every, key=lambda each: each.nearness, reverse=True)[:NEAREST])


async def explain(controller: AdmissionController, tenant_id: UUID, request_id: str) -> Refusal:
    """Why a request was refused. Raises `RefusalNotFound` after a day, or if no limit refused it; `StoreUnavailable`."""
    found = await controller.explain(tenant_id, request_id)
    if found is None:
        raise RefusalNotFound("no request of this id was refused by a limit in the last 24 hours")
    return _refusal(found)


async def bounds(session: AsyncSession, tenant_id: UUID) -> Mapping[str, int | None]:
    """The limits of the tenant by their names, which those of its keys and adapters must not exceed; None is no limit."""
    above = (await QuotaRepository(session, tenant_id).tenant()).limits
    return {each: above.get(each) for each in COUNTED}


async def stored_of_key(session: AsyncSession, tenant_id: UUID, key_id: str) -> StoredLimits:
    """Read the limits that a key has itself, then those of its group, without those of its tenant. Raises `KeyNotFound`."""
    repository = QuotaRepository(session, tenant_id)
    group = await repository.group_of(key_id)
    states = [await repository.key(key_id), *([] if group is None else [group])]
    subjects = [
        LimitedSubject(
            level=state.level,
            id=state.name,
            name=state.name,
            revision=state.revision,
            limits=tuple(_limits(state, state.name)),
            set_by=None,
            set_at=None,
        )
        for state in states
    ]
    return StoredLimits(states, tuple(subjects))


async def of_key(session: AsyncSession, tenant_id: UUID, key_id: str) -> EditedLimits:
    """The limits of a key. Raises `KeyNotFound`."""
    repository = QuotaRepository(session, tenant_id)
    state = await repository.key(key_id)
    return await _edited(repository, state, (await repository.key_names([key_id]))[key_id])


async def of_adapter(session: AsyncSession, tenant_id: UUID, name: str) -> EditedLimits:
    """The limits of an adapter. Raises `AdapterNotFound`."""
    repository = QuotaRepository(session, tenant_id)
    return await _edited(repository, await repository.adapter(name), name)


async def crossed_budgets(session: AsyncSession, tenant_id: UUID) -> tuple[Crossed, ...]:
    """The newest events of budgets that crossed 80 or 100 percent."""
    return tuple(
        Crossed(
            at=row.created_at,
            level=row.level,
            name=key_id or adapter,
            limit_name=row.limit_name,
            period=row.period,
            threshold=row.threshold,
            used=row.used,
            limit=row.limit_value,
        )
        for row, key_id, adapter in await quota_events(session, tenant_id, None, EVENTS)
    )


async def _edited(repository: QuotaRepository, state: QuotaState, name: str) -> EditedLimits:
    above = (await repository.tenant()).limits
    return EditedLimits(
        level=state.level,
        id=state.name,
        name=name,
        revision=state.revision,
        limits={each: state.limits.get(each) for each in COUNTED},
        bounds={each: above.get(each) for each in COUNTED},
    )


def _limits(state: QuotaState, subject: str) -> Iterable[LimitState]:
    """The limits that the subject has, in the order of their names in the API."""
    for name in COUNTED if state.level == "tenant" else MAXIMA:
        limit = state.limits.get(name)
        if limit is not None:
            yield LimitState(
                level=state.level,
                subject=subject,
                name=name,
                limit=limit,
                used=None,
                reserved=None,
                resets_at=None,
            )


def _counted(limit: LimitState, subject_id: UUID, uses: Mapping[tuple[UUID, str], LimitUse]) -> LimitState:
    use = uses.get((subject_id, limit.name))
    if use is None:
        return limit
    return replace(limit, used=use.used, reserved=use.reserved, resets_at=use.resets_at)


def _refusal(found: Explanation) -> Refusal:
    decisions = [
        LimitDecision(
            level=each.level,
            name=each.name,
            limit=each.limit,
            used=each.used,
            reserved=each.reserved,
            asked=each.asked,
            passed=each.passed,
            retry_after_s=each.retry_after_s,
            known=True,
        )
        for each in found.decisions
    ]
    unknown = [
        LimitDecision(
            level=each.level,
            name=each.name,
            limit=each.limit,
            used=None,
            reserved=None,
            asked=each.asked,
            passed=False,
            retry_after_s=None,
            known=False,
        )
        for each in found.unknown
    ]
    return Refusal(
        request_id=found.request_id, at=found.at, degraded=found.degraded, decisions=(*decisions, *unknown)
    )


def _target(state: QuotaState) -> str:
    """The target of audit entries about these limits."""
    place = str(state.subject_id) if state.level == "tenant" else state.name
    return f"{state.subject.counter[0]}s/{place}/quotas"
