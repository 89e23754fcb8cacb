"""Every limit of a tenant, counted in Valkey by one atomic script per step. Invariant: what is settled and open together
never exceeds a limit, whoever asks at the same time; `README.md` has the proof.
"""

from collections.abc import Sequence
from typing import Any, get_args
from uuid import UUID

from loraplex.tenants.counters.counter_replies import (
    CounterReply,
    Explanation,
    Heartbeat,
    LimitUse,
    Settled,
    SettledUse,
)
from loraplex.tenants.counters.reply_decoding import (
    decode_admission,
    decode_explanation,
    decode_settled,
    decode_use,
    member,
)
from loraplex.tenants.counters.script_runner import ScriptName, ScriptRunner, load_script
from loraplex.tenants.counters.snapshot import CounterSnapshot
from loraplex.tenants.errors import ValkeyUnavailable
from loraplex.tenants.quotas.limits import BUDGETS, COUNTED, NANO_PER_MICRO, Subject
from loraplex.tenants.quotas.reservation import NOTHING_USED, ActualUsage, CounterReservation, ReservedAmounts
from loraplex.tenants.valkey import ANSWER_SECONDS, COMMAND_SECONDS, Valkey, tenant_key

LEASE_S = 45.0
MAX_EXPIRED = 1000
# Ten commands each: one script is over within about a millisecond.
SUBJECTS_AT_ONCE = 64
READ_TRIES = 3
NO_ADAPTER = "-"
ANY_EPOCH = ""


class Counters:
    """All methods raise `ValkeyUnavailable` when Valkey does not answer in time; then the step may or may not have
    happened, and may be repeated: every one is idempotent.
    """

    def __init__(
        self,
        redis: Valkey,
        patient: Valkey | None = None,
        *,
        lease_s: float = LEASE_S,
        command_s: float = COMMAND_SECONDS,
        patient_s: float = ANSWER_SECONDS,
    ) -> None:
        """`redis` serves what requests wait for, within `command_s`; `patient` what may be large, within `patient_s`."""
        self._redis = ScriptRunner(redis, command_s)
        self._patient = ScriptRunner(patient or redis, patient_s)
        self._lease_us = round(lease_s * 1e6)
        self._scripts = {name: load_script(name) for name in get_args(ScriptName)}

    @property
    def script_fallbacks(self) -> int:
        """How often Valkey did not know a script and was sent its text."""
        return self._redis.fallbacks + self._patient.fallbacks

    async def admit(self, request: CounterReservation) -> CounterReply:
        """Tests every limit at every level, then takes from all of them or from none."""
        head = (
            str(request.id),
            request.request_id,
            request.policy_epoch,
            request.tokens,
            request.amount_nano,
        )
        subjects = [part for subject in request.subjects for part in subject_arguments(subject)]
        return decode_admission(
            await self._run(self._redis, "admit", request.tenant_id, *head, self._lease_us, *subjects)
        )

    async def settle(
        self,
        tenant_id: UUID,
        reservation_id: UUID,
        actual: ActualUsage,
        *,
        charge: ReservedAmounts | None = None,
    ) -> Settled:
        """Ends a reservation with what was really used. Nothing happens to an id without one, unless `charge` says for
        whom and in which periods to count it (once); with an epoch in `charge`, only under that epoch.
        """
        to_charge: tuple[str, ...] = ()
        if charge is not None:
            to_charge = (*whose(charge), charge.day, charge.month, admitted_under(charge))
        return await self._end(self._redis, tenant_id, reservation_id, actual, "settle", *to_charge)

    async def release(self, tenant_id: UUID, reservation_id: UUID) -> Settled:
        """Ends a reservation unused. An admission of this id that arrives later answers `AlreadyEnded`."""
        return await self.settle(tenant_id, reservation_id, NOTHING_USED)

    async def reap(self, tenant_id: UUID, reservation_id: UUID, actual: ActualUsage) -> Settled:
        """As `settle`, but only if its lease is over: a heartbeat that came meanwhile wins."""
        return await self._end(self._patient, tenant_id, reservation_id, actual, "reap")

    async def heartbeat(self, tenant_id: UUID, holds: Sequence[ReservedAmounts]) -> Heartbeat:
        """Extends the leases; a reservation that Valkey lost is made anew under its own epoch (None: any)."""
        rows = [part for hold in holds for part in (*hold_arguments(hold), admitted_under(hold))]
        answer = await self._run(self._patient, "heartbeat", tenant_id, self._lease_us, *rows)
        if not answer:
            return Heartbeat(None)
        outcomes: tuple[set[UUID], set[UUID], set[UUID]] = (set(), set(), set())
        for hold, outcome in zip(holds, answer[1:], strict=True):
            outcomes[outcome - 1].add(hold.id)
        return Heartbeat(answer[0], *map(frozenset, outcomes))

    async def expired(self, tenant_id: UUID) -> list[UUID]:
        """Reservations whose lease is over, longest first; at most `MAX_EXPIRED`."""
        return [*map(member, await self._run(self._patient, "expired", tenant_id, MAX_EXPIRED))]

    async def seed(self, tenant_id: UUID, epoch: int, seed: CounterSnapshot) -> int:
        """Replaces all counters, unless they are of this epoch or a later one; buckets that live go on into the epoch that
        follows theirs. Returns the epoch in force, or 0 if they were forgotten since this epoch.
        """
        totals = [
            part
            for total in seed.totals
            for part in (
                subject_name(total.level, total.subject_id),
                total.period,
                total.tokens,
                total.amount_nano,
            )
        ]
        holds = [part for hold in seed.holds for part in hold_arguments(hold)]
        head = (epoch, seed.policy_epoch, int(seed.full_buckets), self._lease_us, len(seed.totals))
        in_force: int = await self._run(self._patient, "rebuild", tenant_id, *head, *totals, *holds)
        return in_force

    async def invalidate(self, tenant_id: UUID, epoch: int | None = None) -> bool:
        """Forgets the counters (of that epoch only): the next admission answers `CountersMissing`. What the policy is stays known.
        Returns whether there were any.
        """
        only = ANY_EPOCH if epoch is None else epoch
        return bool(await self._run(self._patient, "invalidate", tenant_id, only))

    async def read(self, tenant_id: UUID, subjects: Sequence[Subject]) -> list[LimitUse] | None:
        """What is used, of every limit of every subject, under one epoch; None when the counters are not seeded. Other
        tenants' scripts run between those of many subjects.
        """
        for _ in range(READ_TRIES):
            parts = [await self._read(tenant_id, part) for part in parts_of(subjects)]
            known = [part for part in parts if part is not None]
            if len(known) < len(parts):
                return None
            if len({epoch for epoch, _ in known}) <= 1:
                return [use for _, uses in known for use in uses]
        raise ValkeyUnavailable("the counters were replaced while they were read; try again")

    async def settled(self, tenant_id: UUID) -> SettledUse | None:
        """What the tenant itself has settled in the current periods; None when the counters are not seeded."""
        return decode_settled(await self._run(self._patient, "settled", tenant_id))

    async def publish_policy(self, tenant_id: UUID, policy_epoch: int) -> int:
        """Requests that were read under an older policy are stale from now on. Returns the newest, never smaller."""
        newest: int = await self._run(self._patient, "publish_policy", tenant_id, policy_epoch)
        return newest

    async def explain(self, tenant_id: UUID, request_id: str) -> Explanation | None:
        """Why a request was denied; known for the tenant's last 1,000 denials of 24 hours."""
        return decode_explanation(await self._run(self._patient, "explain", tenant_id, request_id))

    async def _read(self, tenant_id: UUID, subjects: Sequence[Subject]) -> tuple[int, list[LimitUse]] | None:
        rows = [
            part
            for subject in subjects
            for part in (subject_name(subject.level, subject.id), *limit_arguments(subject)[:2])
        ]
        return decode_use(await self._run(self._patient, "read", tenant_id, *rows), subjects)

    async def _end(
        self, runner: ScriptRunner, tenant_id: UUID, reservation_id: UUID, actual: ActualUsage, *more: str
    ) -> Settled:
        amounts = (str(reservation_id), actual.tokens, actual.amount_nano)
        found, charged, epoch = await self._run(runner, "settle", tenant_id, *amounts, *more)
        return Settled(bool(found), bool(charged), epoch)

    async def _run(
        self, runner: ScriptRunner, name: ScriptName, tenant_id: UUID, *arguments: str | int
    ) -> Any:
        return await runner.run(self._scripts[name], tenant_key(tenant_id, "state"), arguments)


def parts_of(subjects: Sequence[Subject]) -> list[Sequence[Subject]]:
    """What one script reads, at least one part."""
    starts = range(0, max(1, len(subjects)), SUBJECTS_AT_ONCE)
    return [subjects[start : start + SUBJECTS_AT_ONCE] for start in starts]


def subject_name(level: str, subject_id: UUID) -> str:
    """As it stands in the names of keys; the tenant is there already, as their hash tag."""
    return level if level == "tenant" else f"{level}:{subject_id}"


def subject_arguments(subject: Subject) -> tuple[str | int, ...]:
    return (subject.level, str(subject.id), *limit_arguments(subject))


def limit_arguments(subject: Subject) -> tuple[str | int, ...]:
    """In the order of `COUNTED`; budgets in nano-units, as they are counted."""
    limits = ((name, subject.limits.get(name)) for name in COUNTED)
    return tuple(
        "" if limit is None else limit * NANO_PER_MICRO if name in BUDGETS else limit
        for name, limit in limits
    )


def hold_arguments(hold: ReservedAmounts) -> tuple[str | int, ...]:
    return (str(hold.id), *whose(hold), hold.tokens, hold.amount_nano, hold.day, hold.month)


def whose(hold: ReservedAmounts) -> tuple[str, str]:
    return str(hold.api_key_id), NO_ADAPTER if hold.adapter_id is None else str(hold.adapter_id)


def admitted_under(hold: ReservedAmounts) -> str:
    return ANY_EPOCH if hold.epoch is None else str(hold.epoch)
