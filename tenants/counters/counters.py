"""Counts every limit of a tenant in Valkey, by one atomic script per step.

Invariant: settled plus open use never exceeds a limit under any concurrency; README.md has the proof.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, get_args
from uuid import UUID

import structlog
from redis.asyncio import Redis

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
from loraplex.tenants.quotas.reservation import NOTHING_USED, Reservation, ReservationRequest, SettledUsage
from loraplex.tenants.valkey import ANSWER_SECONDS, COMMAND_SECONDS, tenant_key

LEASE_S = 45.0
MAX_EXPIRED = 1000
# Ten commands each: a script of this size ends within about a millisecond.
SUBJECTS_AT_ONCE = 64
READ_TRIES = 3
UNITS = tuple(NANO_PER_MICRO if name in BUDGETS else 1 for name in COUNTED)
NO_ADAPTER = "-"
ANY_EPOCH = ""
LOG = structlog.get_logger("loraplex.counters")
_counted_limits = attrgetter(*COUNTED)


class Counters:
    """The counters of all tenants. All methods raise `ValkeyUnavailable` when Valkey does not reply in time.

    The step may or may not have happened then, and may be repeated: every step is idempotent. All methods raise
    `CountersNewer` where the counters have a layout of a newer release. That is no failure of Valkey, and nothing was done.
    """

    def __init__(
        self,
        redis: Redis,
        bulk_redis: Redis | None = None,
        *,
        lease_s: float = LEASE_S,
        command_s: float = COMMAND_SECONDS,
        bulk_s: float = ANSWER_SECONDS,
    ) -> None:
        """`redis` serves what requests wait for, within `command_s`; `bulk_redis` what may be large, within `bulk_s`."""
        self._met_newer = False
        self._redis = ScriptRunner(redis, command_s, on_newer=self._warn_of_newer)
        self._bulk = ScriptRunner(bulk_redis or redis, bulk_s, bulk=True, on_newer=self._warn_of_newer)
        self._lease_us = round(lease_s * 1e6)
        self._scripts = {name: load_script(name) for name in get_args(ScriptName)}

    @property
    def script_fallbacks(self) -> int:
        """How often a script was sent with its text because Valkey did not know it."""
        return self._redis.fallbacks + self._bulk.fallbacks

    async def reserve(self, request: ReservationRequest, wait_s: float | None = None) -> CounterReply:
        """Test every limit at every level, then take from all of them or from none. `wait_s`: in place of `command_s`."""
        head = (
            str(request.id),
            request.request_id,
            request.policy_epoch,
            request.tokens,
            request.amount_nano,
            request.sequences,
        )
        session = session_argument(request)
        width = len(COUNTED) if session else len(COUNTED) - 1
        subjects = [part for subject in request.subjects for part in subject_arguments(subject, width)]
        script, key = self._scripts["admit"], tenant_key(request.tenant_id, "state")
        arguments = (*head, self._lease_us, session, *subjects)
        return decode_admission(await self._redis.run(script, key, arguments, deadline_s=wait_s))

    async def settle(
        self,
        tenant_id: UUID,
        reservation_id: UUID,
        usage: SettledUsage,
        *,
        charge: Reservation | None = None,
    ) -> Settled:
        """End a reservation with the use. An id without a reservation changes nothing, unless `charge` is given.

        `charge` names the subjects and periods to count the use in, once; with an epoch, only under that epoch.
        """
        to_charge = () if charge is None else charge_arguments(charge)
        arguments = (*end_arguments(reservation_id, usage), "settle", *to_charge)
        return settled_by(await self._run(self._redis, "settle", tenant_id, *arguments))

    async def settle_early(self, reservation: Reservation, usage: SettledUsage) -> Settled:
        """As `settle`, before the ledger has the use: an id without a reservation changes nothing and is not remembered."""
        script, key = self._scripts["settle"], tenant_key(reservation.tenant_id, "state")
        arguments = (*end_arguments(reservation.id, usage), "early", *charge_arguments(reservation))
        return settled_by(await self._redis.run(script, key, arguments))

    async def cancel(self, tenant_id: UUID, reservation_id: UUID) -> Settled:
        """End a reservation unused. A later admission of this id gets `AlreadyEnded`."""
        return await self.settle(tenant_id, reservation_id, NOTHING_USED)

    async def reap(self, tenant_id: UUID, reservation_id: UUID, usage: SettledUsage) -> Settled:
        """As `settle`, but only if the lease has expired; a heartbeat that arrived meanwhile keeps it."""
        arguments = (*end_arguments(reservation_id, usage), "reap")
        return settled_by(await self._run(self._bulk, "settle", tenant_id, *arguments))

    async def heartbeat(self, tenant_id: UUID, reservations: Sequence[Reservation]) -> Heartbeat:
        """Extend the leases. A reservation that Valkey lost is recreated, under its own epoch only (None: any)."""
        rows = [
            part
            for each in reservations
            for part in (*reservation_arguments(each), admitted_under(each), session_argument(each.request))
        ]
        reply = await self._run(self._bulk, "heartbeat", tenant_id, self._lease_us, *rows)
        if not reply:
            return Heartbeat(None)
        outcomes: tuple[set[UUID], set[UUID], set[UUID]] = (set(), set(), set())
        for each, outcome in zip(reservations, reply[1:], strict=True):
            outcomes[outcome - 1].add(each.id)
        return Heartbeat(reply[0], *map(frozenset, outcomes))

    async def expired(self, tenant_id: UUID) -> list[UUID]:
        """Reservations whose lease has expired, the oldest expiry first; at most `MAX_EXPIRED`."""
        return [*map(member, await self._run(self._bulk, "expired", tenant_id, MAX_EXPIRED))]

    async def rebuild(self, tenant_id: UUID, epoch: int, snapshot: CounterSnapshot) -> int:
        """Replace all counters, unless they are of this epoch or a later one. Live buckets continue in the epoch after theirs.

        Returns the epoch in force, or 0 if the counters were invalidated since this epoch.
        """
        totals = [
            part
            for total in snapshot.totals
            for part in (
                subject_name((total.level, total.subject_id)),
                total.period,
                total.tokens,
                total.amount_nano,
            )
        ]
        reservations = [part for each in snapshot.reservations for part in reservation_arguments(each)]
        head = (
            epoch,
            snapshot.policy_epoch,
            int(snapshot.full_buckets),
            self._lease_us,
            len(snapshot.totals),
        )
        in_force: int = await self._run(self._bulk, "rebuild", tenant_id, *head, *totals, *reservations)
        return in_force

    async def invalidate(self, tenant_id: UUID, epoch: int | None = None) -> bool:
        """Discard the counters (of that epoch only): the next admission gets `CountersMissing`. The policy epoch is kept.

        Returns whether there were any.
        """
        only = ANY_EPOCH if epoch is None else epoch
        return bool(await self._run(self._bulk, "invalidate", tenant_id, only))

    async def read(
        self, tenant_id: UUID, subjects: Sequence[Subject], session: str | None = None
    ) -> list[LimitUse] | None:
        """The use of every limit of every subject, under one epoch; None without counters. What sessions use is known only of
        the `session` that is given, if a limit counts it.

        Many subjects are read by several scripts, so that other tenants' scripts can run in between.
        """
        for _ in range(READ_TRIES):
            parts = [await self._read(tenant_id, part, session) for part in parts_of(subjects)]
            known = [part for part in parts if part is not None]
            if len(known) < len(parts):
                return None
            if len({epoch for epoch, _ in known}) <= 1:
                return [use for _, uses in known for use in uses]
        raise ValkeyUnavailable("the counters were replaced while they were read; try again")

    async def settled(self, tenant_id: UUID) -> SettledUse | None:
        """The tenant's own settled use in the current periods; None without counters."""
        return decode_settled(await self._run(self._bulk, "settled", tenant_id))

    async def publish_policy(self, tenant_id: UUID, policy_epoch: int) -> int:
        """Make requests with an older policy stale. Returns the newest policy epoch, which never decreases."""
        newest: int = await self._run(self._bulk, "publish_policy", tenant_id, policy_epoch)
        return newest

    async def explain(self, tenant_id: UUID, request_id: str) -> Explanation | None:
        """Why a request was denied; known for the tenant's last 1,000 denials of 24 hours."""
        return decode_explanation(await self._run(self._bulk, "explain", tenant_id, request_id))

    async def _read(
        self, tenant_id: UUID, subjects: Sequence[Subject], session: str | None
    ) -> tuple[int, list[LimitUse]] | None:
        rows = [
            part
            for subject in subjects
            for part in (subject_name(subject.counter), *limit_arguments(subject)[:2])
        ]
        reply = await self._run(self._bulk, "read", tenant_id, session or "", *rows)
        return decode_use(reply, subjects, in_session=session is not None)

    def _warn_of_newer(self, state_key: str) -> None:
        if not self._met_newer:
            self._met_newer = True
            LOG.warning(
                "gateways of a newer release count for some tenants; this one serves them by its shares, without budgets, "
                "until it is upgraded",
                first_tenant=state_key.partition("{")[2].partition("}")[0],
            )

    async def _run(
        self, runner: ScriptRunner, name: ScriptName, tenant_id: UUID, *arguments: str | int
    ) -> Any:
        return await runner.run(self._scripts[name], tenant_key(tenant_id, "state"), arguments)


def parts_of(subjects: Sequence[Subject]) -> list[Sequence[Subject]]:
    """The subjects in parts that one script reads each; at least one part."""
    starts = range(0, max(1, len(subjects)), SUBJECTS_AT_ONCE)
    return [subjects[start : start + SUBJECTS_AT_ONCE] for start in starts]


def subject_name(counter: tuple[str, UUID]) -> str:
    """A subject as key names contain it; the tenant's id is in their hash tag already."""
    level, subject_id = counter
    return level if level == "tenant" else f"{level}:{subject_id}"


def subject_arguments(subject: Subject, width: int) -> tuple[str | int, ...]:
    """The first `width` limits: the last one is asked of sessions only."""
    return (subject.level, str(subject.id), *limit_arguments(subject)[:width])


def limit_arguments(subject: Subject) -> tuple[str | int, ...]:
    """The limits in the order of `COUNTED`; budgets in nano-units, as the counters have them."""
    limits = zip(_counted_limits(subject.limits), UNITS, strict=True)
    return tuple(["" if limit is None else limit * unit for limit, unit in limits])


def end_arguments(reservation_id: UUID, usage: SettledUsage) -> tuple[str | int, ...]:
    return str(reservation_id), usage.tokens, usage.amount_nano, int(usage.refused)


def settled_by(reply: Any) -> Settled:
    found, charged, epoch = reply
    return Settled(bool(found), bool(charged), epoch)


def reservation_arguments(reservation: Reservation) -> tuple[str | int, ...]:
    request = reservation.request
    return (
        str(request.id),
        *subject_ids(request),
        request.tokens,
        request.amount_nano,
        reservation.day,
        reservation.month,
        request.sequences,
    )


def session_argument(request: ReservationRequest) -> str:
    """The session that the counters count; empty where no limit needs it."""
    return request.session or "" if request.counts_session else ""


def subject_ids(request: ReservationRequest) -> tuple[str, str]:
    """The key, with the root of its group behind an @, and the adapter."""
    key, root = str(request.api_key_id), request.limit_root
    adapter = NO_ADAPTER if request.adapter_id is None else str(request.adapter_id)
    return key if root is None else f"{key}@{root}", adapter


def charge_arguments(reservation: Reservation) -> tuple[str, ...]:
    subjects, session = subject_ids(reservation.request), session_argument(reservation.request)
    return (*subjects, reservation.day, reservation.month, admitted_under(reservation), session)


def admitted_under(reservation: Reservation) -> str:
    return ANY_EPOCH if reservation.epoch is None else str(reservation.epoch)
