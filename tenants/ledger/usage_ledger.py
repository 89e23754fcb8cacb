"""The usage ledger in PostgreSQL, written as `app_writer`: reservations, usage, totals, thresholds, epochs, fences, gateways.

Invariant: a usage record is written once per request, in one transaction with its totals. tenants/admission/README.md,
"Epochs", describes how reservations and counter rebuilds see each other.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias
from uuid import UUID

import msgspec
import psycopg
import structlog
from sqlalchemy import func, select

from loraplex.tenants.billing.pricing import NO_PRICE
from loraplex.tenants.counters.counter_replies import PeriodUse, SettledUse
from loraplex.tenants.counters.snapshot import CounterSnapshot, PeriodTotal
from loraplex.tenants.database import Database, first_line
from loraplex.tenants.errors import DatabaseUnavailable, TenantNotFound
from loraplex.tenants.ids import uuid7_from
from loraplex.tenants.ledger import statements
from loraplex.tenants.ledger.failed_requests import Failure, Refused
from loraplex.tenants.ledger.histograms import TTFT_BOUNDS_MS, bucket_of
from loraplex.tenants.ledger.write_batching import WriteBatcher
from loraplex.tenants.ledger.writer_connection import WriterConnection
from loraplex.tenants.models import ApiKey, ReservationRow, Tenant, UsageTotal
from loraplex.tenants.periods import periods_around
from loraplex.tenants.quotas.policies import ROWS_AT_ONCE, TenantPolicy, policy_of, policy_rows
from loraplex.tenants.quotas.reservation import (
    NO_REQUEST_ID,
    UNKNOWN_TIMINGS,
    RequestTimings,
    Reservation,
    ReservationRequest,
    SettledUsage,
)
from loraplex.tenants.running_requests import LOCK_FENCES

MAX_REAPED = 256
FORGOTTEN_GATEWAY_SECONDS = 3600.0
# The largest difference allowed between a gateway's clock, which is in its ids, and Valkey's.
MAX_SKEW = timedelta(seconds=30)
# From here on a clock is not only imprecise but wrong, and its host has to be repaired.
LOGGED_SKEW = timedelta(minutes=5)
# A request admitted so long after the counters were read comes from a clock that is ahead of theirs.
AHEAD = timedelta(seconds=1)
LOG = structlog.get_logger("loraplex.usage_ledger")

Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ended:
    """Whose running requests end: those of the tenant's callers that were read at `policy_epoch` or before, zero for none; those
    of keys; those on versions, each an adapter and a number.
    """

    tenant_id: UUID
    policy_epoch: int = 0
    key_ids: frozenset[UUID] = frozenset()
    versions: frozenset[tuple[UUID, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Fence:
    """A fence of a tenant. Counters of `fenced_epoch` and of earlier epochs are outdated; zero: none are.

    `ended`: what ended since the fences that were read before; `policy_epoch`: the tenant's then, or later.
    """

    tenant_id: UUID
    fenced_epoch: int
    number: int
    ended: Ended | None = None
    policy_epoch: int = 0


@dataclass(frozen=True, slots=True)
class LedgerWrite:
    """A settlement. `written` False: the ledger had a record of this request already.

    `epoch`: the tenant's, locked while the record was written; None if it has none yet. `limit_root`: of the key's group at that
    time; None if no key stands below it.
    """

    written: bool
    epoch: int | None
    limit_root: UUID | None = None


class UsageLedger:
    """The usage ledger. All methods raise `DatabaseUnavailable`; then the write may have happened, and may be repeated."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._reserving = WriterConnection(database.url, durable=True)
        self._settling = WriterConnection(database.url, durable=True)
        self._general = WriterConnection(database.url, durable=False)
        self._reservations = WriteBatcher(self._reserve)
        self._reservations_without_counters = WriteBatcher(self._reserve_without_counters)
        self._settlements = WriteBatcher(self._settle)
        self._is_skewed = False

    def reserve(self, reservation: Reservation, gateway_id: UUID, lease_s: float) -> Awaitable[bool]:
        """Store a reservation unless its usage is in the ledger; may be repeated. Return whether its policy is outdated."""
        return self._reservations.add(reservation_row(reservation, gateway_id, lease_s))

    def reserve_without_counters(
        self, reservation: Reservation, gateway_id: UUID, lease_s: float
    ) -> Awaitable[int | None]:
        """Store a reservation that no counters admitted if its policy is the newest; None otherwise.

        Returns the tenant's epoch, locked while the row was written: later rebuilds include the row.
        """
        return self._reservations_without_counters.add(reservation_row(reservation, gateway_id, lease_s))

    def settle(self, reservation: Reservation, usage: SettledUsage) -> Awaitable[LedgerWrite]:
        """Write usage durably; may be repeated. Raises `psycopg.Error` for a row that PostgreSQL rejects."""
        return self._settlements.add(usage_row(reservation, usage))

    async def count_refusals(self, counts: Mapping[Refused, int]) -> None:
        """Add counts of refused requests to the rollups. Not idempotent: a repeated write counts again."""
        rows = [{**refused._asdict(), "requests": requests} for refused, requests in counts.items()]
        await self._general.fetch(statements.COUNT_REFUSALS, to_json(rows))

    async def keep_failed(self, failures: Sequence[Failure]) -> None:
        """Write requests that failed; may be repeated, with what they omit by then."""
        await self._general.fetch(statements.KEEP_FAILED, to_json([asdict(each) for each in failures]))

    async def renew(self, ids: Sequence[UUID], lease_s: float) -> None:
        """Renew the leases of open reservations."""
        if ids:
            await self._general.fetch(statements.RENEW, lease_s, [*ids])

    async def take_expired(self, before: datetime, put_off_s: float) -> list[Reservation]:
        """Claim reservations whose lease has expired `before` a time of PostgreSQL. Their lease is extended by `put_off_s`, so
        that only one gateway handles each."""
        rows = await self._general.fetch(statements.EXPIRED, put_off_s, before, MAX_REAPED)
        return [stored_reservation(row) for row in rows]

    async def known(self, ids: Sequence[UUID]) -> dict[UUID, SettledUsage | None]:
        """The requests of these ids that are in the ledger, with what they used; None while they are open."""
        rows = await self._general.fetch(statements.KNOWN, [*ids], [*ids])
        return {row[0]: None if row[1] is None else stored_usage(row[1:]) for row in rows}

    async def policy(self, tenant_id: UUID) -> TenantPolicy:
        """The tenant's current limits. Raises `TenantNotFound`."""
        async with self._database.as_writer() as session:
            rows = await session.stream(policy_rows(tenant_id))
            policy = await policy_of(rows.partitions(ROWS_AT_ONCE))
        if policy is None:
            raise TenantNotFound(f"no tenant {tenant_id}")
        return policy

    async def epoch(self, tenant_id: UUID) -> int:
        """The number of the tenant's newest counter rebuild; zero before the first."""
        rows = await self._general.fetch(statements.EPOCH, tenant_id)
        return next((epoch for (epoch,) in rows), 0)

    async def settled(self, tenant_id: UUID, counted: SettledUse, waited_s: float = 0.0) -> SettledUse | None:
        """What the counters should have settled when they were read, `waited_s` ago. None if unknown: the tenant's counters
        were never built, or it has records of a clock that is ahead.
        """
        first_id = uuid7_from(counted.at - MAX_SKEW)
        least_id = min([first_id, *counted.open])
        periods = [use.period for use in counted.uses]
        ahead = counted.at + timedelta(seconds=waited_s) + AHEAD
        rows = await self._general.fetch(
            statements.SETTLED,
            *(
                tenant_id,
                least_id,
                [*counted.open],
                first_id,
                counted.at,
                ahead,
                periods,
                tenant_id,
            ),
        )
        if not rows or rows[0][-1] or rows[1][-1]:
            return None
        day, month = (PeriodUse(*row[1:4]) for row in rows)
        return SettledUse(rows[0][0], counted.at, (day, month))

    async def raise_fence(self, tenant_id: UUID, *, above: int = 0, outdates: bool = True) -> Fence:
        """Raise the tenant's next fence. With `outdates`, its counters are outdated, those up to epoch `above` included."""
        async with self._database.as_writer() as session:
            await session.execute(LOCK_FENCES)
            parameters = {"tenant_id": tenant_id, "above": above, "outdates": outdates}
            number, fenced_epoch = (await session.execute(statements.RAISE_FENCE, parameters)).one()
        return Fence(tenant_id, fenced_epoch, number)

    async def fences(self, after: int, ended_after: int | None = None) -> tuple[datetime, list[Fence]]:
        """PostgreSQL's time, and the newest fence of every tenant that has one above `after`, with what ended by a fence above
        `ended_after`; None where nothing runs that could end. It never skips one that is committed later.
        """
        rows = await self._general.fetch(statements.FENCES, ended_after, ended_after, after)
        return rows[0][0], [fence_of(*values) for _, *values in rows if values[0] is not None]

    async def confirm_fence(self, gateway_id: UUID, fence: int) -> None:
        """Note that this gateway's journal is shipped up to the moment at which it saw the fence."""
        await self._general.fetch(statements.CONFIRM, gateway_id, fence)

    async def unconfirmed(self, fence: int, live_s: float | None) -> int:
        """The number of gateways, seen within `live_s` (None: at any time), that have not confirmed the fence."""
        [(count,)] = await self._general.fetch(statements.UNCONFIRMED, fence, live_s is None, live_s or 0.0)
        return int(count)

    async def take_snapshot(self, fence: Fence) -> tuple[int, CounterSnapshot] | None:
        """Take the epoch behind `fence`, which every gateway has confirmed, and read what its counters start from. The tenant's
        ledger does not change meanwhile. None if the tenant has a later epoch: the fence says nothing about its counters.
        """
        tenant_id = fence.tenant_id
        async with self._database.as_writer() as session:
            parameters = {"tenant_id": tenant_id, "fenced_epoch": fence.fenced_epoch}
            epoch = (await session.execute(statements.NEXT_EPOCH, parameters)).scalar_one_or_none()
            if epoch is None:
                return None
            periods = periods_around(datetime.now(UTC))
            totals = await session.scalars(
                select(UsageTotal).where(UsageTotal.tenant_id == tenant_id, UsageTotal.period.in_(periods))
            )
            of_periods = {"tenant_id": tenant_id, "periods": [*periods]}
            below = await session.execute(statements.USED_BELOW, of_periods)
            columns = [getattr(ReservationRow, name) for name in statements.STORED_RESERVATION]
            open_requests = await session.execute(
                select(*columns, func.nullif(ApiKey.limit_root, ApiKey.id))
                .outerjoin(ApiKey, ApiKey.id == ReservationRow.api_key_id)
                .where(ReservationRow.tenant_id == tenant_id)
            )
            policy = await session.execute(select(Tenant.policy_epoch).where(Tenant.id == tenant_id))
            snapshot = CounterSnapshot(
                policy_epoch=policy.scalar_one(),
                totals=(
                    *(period_total(each) for each in totals),
                    *(PeriodTotal("key", root, *used) for root, *used in below),
                ),
                reservations=tuple(stored_reservation(row, root) for *row, root in open_requests),
                full_buckets=epoch == statements.FIRST_EPOCH,
            )
        return epoch, snapshot

    async def record_gateway(self, gateway_id: UUID, live_s: float) -> int:
        """Note that a gateway is alive, and its clock's distance from PostgreSQL's; return the number of live gateways, itself
        included.
        """
        [(skew_ms,)] = await self._general.fetch(statements.SEEN, gateway_id, datetime.now(UTC))
        is_skewed = skew_ms > LOGGED_SKEW.total_seconds() * 1000
        if is_skewed and not self._is_skewed:
            LOG.error(
                "this gateway's clock is far from PostgreSQL's: months are billed late",
                gateway=str(gateway_id),
                skew_s=skew_ms // 1000,
            )
        self._is_skewed = is_skewed
        [(live,)] = await self._general.fetch(statements.LIVE, live_s)
        return int(live)

    async def remove_gateway(self, gateway_id: UUID) -> None:
        """Remove a gateway, and those that were not seen for `FORGOTTEN_GATEWAY_SECONDS`."""
        await self._general.fetch(statements.GONE, gateway_id, FORGOTTEN_GATEWAY_SECONDS)

    async def close(self) -> None:
        for rows in (self._reservations, self._reservations_without_counters, self._settlements):
            await rows.close()
        for connection in (self._reserving, self._settling, self._general):
            await connection.close()

    async def _reserve(self, rows: list[Row]) -> list[bool]:
        outdated = dict(await self._reserving.fetch(statements.RESERVE, to_json(rows)))
        return [outdated.get(row["id"], False) for row in rows]

    async def _reserve_without_counters(self, rows: list[Row]) -> list[int | None]:
        stored = await self._reserving.fetch(statements.RESERVE_WITHOUT_COUNTERS, to_json(rows))
        epochs = {request_id: epoch for request_id, kept, epoch in stored if kept}
        return [epochs.get(row["id"]) for row in rows]

    async def _settle(self, rows: list[Row]) -> list[LedgerWrite]:
        by_id = {
            request_id: LedgerWrite(*write)
            for request_id, *write in await self._settling.fetch(statements.SETTLE, to_json(rows))
        }
        writes = [by_id[row["id"]] for row in rows]
        if roots := {write.limit_root for write in writes} - {None}:
            periods = {row[period] for row in rows for period in ("day", "month")}
            try:
                await self._settling.fetch(statements.CROSSED_BY_GROUPS, [*roots], [*periods])
            except (DatabaseUnavailable, psycopg.Error) as error:
                # What was settled is committed. The next settlement of the group finds the same thresholds.
                LOG.warning("thresholds of groups were not tested", reason=first_line(error))
        return writes


def to_json(rows: Sequence[Row]) -> str:
    return msgspec.json.encode(rows).decode()


def fence_of(
    tenant_id: UUID,
    fenced_epoch: int,
    number: int,
    policy_epoch: int,
    ended_policy_epoch: int,
    key_ids: list[UUID],
    versions: list[tuple[str, int]] | None,
) -> Fence:
    """A fence as `FENCES` reads it."""
    if not (ended_policy_epoch or key_ids or versions):
        return Fence(tenant_id, fenced_epoch, number)
    numbers = frozenset((UUID(adapter_id), version) for adapter_id, version in versions or ())
    ended = Ended(tenant_id, ended_policy_epoch, frozenset(key_ids), numbers)
    return Fence(tenant_id, fenced_epoch, number, ended, policy_epoch)


def reservation_row(reservation: Reservation, gateway_id: UUID, lease_s: float) -> Row:
    """A reservation as `RESERVE` reads it."""
    return {
        **{name: getattr(reservation.request, name) for name in (*statements.REQUESTED, "policy_epoch")},
        **{name: getattr(reservation, name) for name in (*statements.ADMITTED, "epoch")},
        "gateway_id": gateway_id,
        "lease_s": lease_s,
    }


def usage_row(reservation: Reservation, usage: SettledUsage) -> Row:
    """An ended request as `SETTLE` reads it. Without an outcome, its reservation is removed and no record is written."""
    request, timings = reservation.request, usage.timings or UNKNOWN_TIMINGS
    return {
        "id": request.id,
        "tenant_id": request.tenant_id,
        "kind": "usage",
        "reverses_id": None,
        "reason": None,
        "client_request_id": None if request.request_id == NO_REQUEST_ID else request.request_id,
        "api_key_id": request.api_key_id,
        "adapter_id": request.adapter_id,
        "adapter_version": request.adapter_version,
        "digest": request.digest,
        "outcome": usage.outcome,
        "uncached_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "price_version_id": None if reservation.price == NO_PRICE else reservation.price.id,
        "currency": reservation.price.currency,
        "amount_pico": usage.amount_pico,
        **{name: getattr(reservation, name) for name in statements.ADMITTED},
        "ttft_ms": timings.ttft_ms,
        "duration_ms": timings.duration_ms,
        "ttft_bucket": None if timings.ttft_ms is None else bucket_of(TTFT_BOUNDS_MS, timings.ttft_ms),
        "gap_buckets": timings.gap_buckets,
        "phases": _phases(timings),
        "limits": None if usage.limits is None else {"degraded": reservation.degraded, "met": usage.limits},
        "system_fingerprint": usage.system_fingerprint,
        "reasoning_tokens": usage.reasoning_tokens,
        "session": request.session,
        "alias": request.alias,
        "unsatisfied": usage.unsatisfied,
    }


def _phases(timings: RequestTimings) -> dict[str, list[Any]] | None:
    """`{name: [start_ms, duration_ms, causes]}`; a phase without known causes has two values."""
    causes = timings.causes
    return {
        name: [*span, *((causes[name],) if name in causes else ())] for name, span in timings.phases.items()
    } or None


def stored_reservation(values: Sequence[Any], limit_root: UUID | None = None) -> Reservation:
    """An open reservation, from its columns in the order of `STORED_RESERVATION`, and the root of its key's group."""
    row = dict(zip(statements.STORED_RESERVATION, values, strict=True))
    periods = {name: row.pop(name) for name in statements.ADMITTED}
    request = ReservationRequest(**row, limit_root=limit_root)
    return Reservation(request=request, price=NO_PRICE, **periods)


def stored_usage(values: Sequence[Any]) -> SettledUsage:
    """The usage of a record, from its columns in the order of `STORED_USAGE`."""
    return SettledUsage(**dict(zip(statements.STORED_USAGE, values, strict=True)))


def period_total(row: UsageTotal) -> PeriodTotal:
    return PeriodTotal(row.level, row.subject_id, row.period, row.tokens, row.amount_nano)
