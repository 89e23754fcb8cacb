"""Limits with their use, and why a request was refused.

Invariant: what PostgreSQL keeps is read without the counters, so that limits are shown while these do not answer.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.web.console.limit_units import Unit, unit_of
from loraplex.platform.web.limits.documents import (
    DecisionDocument,
    ExplanationDocument,
    LimitDocument,
    QuotaDocument,
)
from loraplex.platform.web.sorting import SortOrder
from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.audit_queries import last_authors
from loraplex.tenants.counters.counter_replies import RETRY_S, LimitUse
from loraplex.tenants.errors import RefusalNotFound, StoreUnavailable
from loraplex.tenants.pages import Slice
from loraplex.tenants.quotas.delegated_quotas import Place, QuotaRepository, QuotaState, ResourceUse
from loraplex.tenants.quotas.limits import COUNTED, Level, QuotaLimits
from loraplex.tenants.records import Record

SUBJECTS: Final = 100
"""Subjects with limits that a page shows; the API has all."""
NEAR: Final = 10_000
"""Parts of a million: 1 %."""
NEAREST: Final = 4
CHANGED: Final = "quotas.change"
OF_KEYS: Final = ("key", "group")
BY_PLACE: Final[SortOrder[QuotaState, Place]] = SortOrder(
    lambda state: state.place, lambda place: place, lambda position: (str(position[0]), str(position[1]))
)


class LimitState(LimitDocument):
    """One limit of one subject. Money in micro-units. `used` and `reserved` are None while the counters do not answer.

    `level` and `subject` say whose limit it is; `subject` is the name of the tenant, key or adapter.
    """

    level: Level
    subject: str
    name: str
    limit: int

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


class LimitedSubject(Record):
    """A tenant, key or adapter with the limits it has. `id`: the key's public id, else its name. `set_by` is None where the
    audit log does not say it any more.
    """

    level: Level
    id: str
    name: str
    limits: tuple[LimitState, ...]
    set_by: str | None = None
    set_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class StoredLimits:
    """What PostgreSQL knows of limits: their subjects as the counters ask for them, and as a page shows them. `resources`: the
    limits of the tenant alone, with their use.
    """

    states: Sequence[QuotaState]
    subjects: tuple[LimitedSubject, ...]
    resources: Mapping[str, ResourceUse]


@dataclass(frozen=True, slots=True)
class NamedLimits:
    """The limits of a tenant, a key or an adapter, with its name as people know it."""

    state: QuotaState
    name: str


async def quota_page(
    session: AsyncSession, tenant_id: UUID, part: Slice[Place]
) -> tuple[list[QuotaState], Mapping[str, ResourceUse]]:
    """Return a part of the subjects with limits, and what the tenant, which is the first of them, uses of its own."""
    repository = QuotaRepository(session, tenant_id)
    states = await repository.page(part.after, part.fetch)
    return states, await repository.resources(states[0].limits) if part.after is None else {}


async def quota_documents(
    controller: QuotaAdmissionController,
    tenant_id: UUID,
    states: Sequence[QuotaState],
    resources: Mapping[str, ResourceUse],
) -> list[QuotaDocument]:
    """Return these limits with their use. Raises `StoreUnavailable`."""
    uses = await _uses(controller, tenant_id, states)
    return [
        QuotaDocument(
            level=state.level,
            name=state.name,
            revision=state.revision,
            limits=_limits(state, uses[state.subject_id], resources),
        )
        for state in states
    ]


async def stored(session: AsyncSession, tenant_id: UUID) -> StoredLimits:
    """Read the limits of the tenant, of its keys and of its adapters, at most `SUBJECTS` of them."""
    repository = QuotaRepository(session, tenant_id)
    states = await repository.page(None, SUBJECTS)
    names = await repository.key_names([state.name for state in states if state.level in OF_KEYS])
    authors = await last_authors(session, tenant_id, CHANGED, {_target(state) for state in states})
    resources = await repository.resources(states[0].limits)
    subjects = []
    for state in states:
        author = authors.get(_target(state))
        name = names.get(state.name, state.name) if state.level in OF_KEYS else state.name
        subject = LimitedSubject(
            level=state.level,
            id=state.name,
            name=name,
            limits=_states(state, name, (), resources),
            set_by=None if author is None else author.actor,
            set_at=None if author is None else author.at,
        )
        subjects.append(subject)
    return StoredLimits(states, tuple(subjects), resources)


async def stored_of_key(session: AsyncSession, tenant_id: UUID, key_id: str) -> StoredLimits:
    """Read the limits that a key has itself, then those of its group, without those of its tenant. Raises `KeyNotFound`."""
    repository = QuotaRepository(session, tenant_id)
    group = await repository.group_of(key_id)
    states = [await repository.key(key_id), *([] if group is None else [group])]
    subjects = [
        LimitedSubject(
            level=state.level, id=state.name, name=state.name, limits=_states(state, state.name, (), {})
        )
        for state in states
    ]
    return StoredLimits(states, tuple(subjects), {})


async def with_use(
    controller: QuotaAdmissionController, tenant_id: UUID, found: StoredLimits
) -> tuple[LimitedSubject, ...] | None:
    """Ask the counters for the use of these limits; None while they do not answer."""
    try:
        uses = await _uses(controller, tenant_id, found.states)
    except StoreUnavailable:
        return None
    counted = []
    for state, subject in zip(found.states, found.subjects, strict=True):
        limits = _states(state, subject.name, uses[state.subject_id], found.resources)
        counted.append(subject.model_copy(update={"limits": limits}))
    return tuple(counted)


def nearest(subjects: Iterable[LimitedSubject]) -> tuple[LimitState, ...]:
    """The limits of which the largest part is taken, at least `NEAR`, the nearest first."""
    every = [each for subject in subjects for each in subject.limits if each.used is not None]
    every = [each for each in every if each.nearness >= (False, NEAR)]
    return tuple(sorted(every, key=lambda each: each.nearness, reverse=True)[:NEAREST])


async def explain(
    controller: QuotaAdmissionController, tenant_id: UUID, request_id: str
) -> ExplanationDocument:
    """Why a request was refused. Raises `RefusalNotFound` after a day, or if no limit refused it; `StoreUnavailable`."""
    found = await controller.explain(tenant_id, request_id)
    if found is None:
        raise RefusalNotFound("no request of this id was refused by a limit in the last 24 hours")
    decisions = [DecisionDocument.model_validate(each) for each in found.decisions]
    for each in found.unknown:
        unknown = DecisionDocument(
            **asdict(each), used=None, reserved=None, passed=False, retry_after_s=RETRY_S
        )
        decisions.append(unknown)
    return ExplanationDocument(
        request_id=found.request_id,
        at=found.at,
        mode="degraded" if found.degraded else "counted",
        decisions=decisions,
    )


async def bounds(session: AsyncSession, tenant_id: UUID) -> Mapping[str, int | None]:
    """The limits of the tenant by their names, which those of its keys and adapters must not exceed; None is no limit."""
    return by_name((await QuotaRepository(session, tenant_id).tenant()).limits)


async def named(session: AsyncSession, tenant_id: UUID, level: str, name: str) -> NamedLimits:
    """The limits of a key by its public id, of an adapter by its name, else of the tenant.

    Raises `KeyNotFound`, `AdapterNotFound`.
    """
    repository = QuotaRepository(session, tenant_id)
    if level == "key":
        state = await repository.key(name)
        return NamedLimits(state, (await repository.key_names([name]))[name])
    state = await repository.adapter(name) if level == "adapter" else await repository.tenant()
    return NamedLimits(state, state.name)


def by_name(limits: QuotaLimits) -> Mapping[str, int | None]:
    """Return the limits that requests are counted against."""
    return {name: limits.get(name) for name in COUNTED}


async def _uses(
    controller: QuotaAdmissionController, tenant_id: UUID, states: Sequence[QuotaState]
) -> Mapping[UUID, Sequence[LimitUse]]:
    """The use of limits by the ids of their subjects; of others none."""
    uses: dict[UUID, list[LimitUse]] = defaultdict(list)
    for use in await controller.quotas(tenant_id, [state.subject for state in states]):
        uses[use.subject_id].append(use)
    return uses


def _limits(
    state: QuotaState, uses: Iterable[LimitUse], resources: Mapping[str, ResourceUse]
) -> dict[str, LimitDocument]:
    """The limits of one subject by their names. `uses` are its own; `resources` are the tenant's, and no other's."""
    known = {use.name: use for use in uses}
    limits: dict[str, LimitDocument] = {}
    for name in COUNTED:
        limit, use = state.limits.get(name), known.get(name)
        limits[name] = (
            LimitDocument(limit=limit, used=None, reserved=None, resets_at=None)
            if use is None
            else LimitDocument(limit=limit, used=use.used, reserved=use.reserved, resets_at=use.resets_at)
        )
    if state.level == "tenant":
        for resource, each in resources.items():
            limits[resource] = LimitDocument(limit=each.limit, used=each.used, reserved=0, resets_at=None)
    return limits


def _states(
    state: QuotaState, subject: str, uses: Iterable[LimitUse], resources: Mapping[str, ResourceUse]
) -> tuple[LimitState, ...]:
    """The limits that the subject has, in the order of their names in the API."""
    return tuple(
        LimitState(level=state.level, subject=subject, name=name, **dict(each))
        for name, each in _limits(state, uses, resources).items()
        if each.limit is not None
    )


def _target(state: QuotaState) -> str:
    """The target of audit entries about these limits."""
    place = str(state.subject_id) if state.level == "tenant" else state.name
    return f"{state.subject.counter[0]}s/{place}/quotas"
