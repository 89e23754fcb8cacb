"""A tenant with limits, requests to its counters, and moving the stored times into the past."""

from dataclasses import dataclass, field, replace
from uuid import UUID, uuid4

from redis.asyncio import Redis

from loraplex.tenants.billing.pricing import NO_PRICE, PICO_PER_NANO
from loraplex.tenants.counters.counter_replies import Admitted, CounterReply, Decision, Denied, LimitUse
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.counters.snapshot import CounterSnapshot
from loraplex.tenants.quotas.limits import NO_LIMITS, QuotaLimits, Subject
from loraplex.tenants.quotas.reservation import Reservation, ReservationRequest, SettledUsage
from loraplex.tenants.valkey import tenant_key

LEVELS = ("tenant", "group", "key", "adapter")
POLICY = 3
EMPTY = CounterSnapshot(policy_epoch=POLICY, totals=(), reservations=(), full_buckets=True)
MICROSECONDS = 1_000_000
TIMES = {
    "state": ("clock", "empty_at"),
    "rate": ("requests_at", "tokens_at", "unpaid_at"),
}


@dataclass(frozen=True)
class LimitedTenant:
    """A tenant with one key and one adapter, and the limits of each; with a `root`, the key is in a group."""

    tenant: QuotaLimits = NO_LIMITS
    key: QuotaLimits = NO_LIMITS
    adapter: QuotaLimits = NO_LIMITS
    tenant_id: UUID = field(default_factory=uuid4)
    key_id: UUID = field(default_factory=uuid4)
    adapter_id: UUID = field(default_factory=uuid4)
    group: QuotaLimits = NO_LIMITS
    root: UUID | None = None

    @property
    def subjects(self) -> tuple[Subject, ...]:
        return (
            Subject("tenant", self.tenant_id, self.tenant),
            *([] if self.root is None else [Subject("group", self.root, self.group)]),
            Subject("key", self.key_id, self.key),
            Subject("adapter", self.adapter_id, self.adapter),
        )

    def child(self, key: QuotaLimits = NO_LIMITS) -> "LimitedTenant":
        """The same with a key below this one, or beside it in its group."""
        group = (self.group, self.root) if self.root else (self.key, self.key_id)
        return replace(self, key=key, key_id=uuid4(), group=group[0], root=group[1])

    def request(
        self,
        tokens: int = 10,
        amount_nano: int = 1000,
        *,
        id: UUID | None = None,
        request_id: str = "r",
        policy_epoch: int = POLICY,
        base: bool = False,
        sequences: int = 1,
        session: str | None = None,
    ) -> ReservationRequest:
        """`base`: for the base model, without the adapter."""
        return ReservationRequest(
            id=id or uuid4(),
            tenant_id=self.tenant_id,
            api_key_id=self.key_id,
            adapter_id=None if base else self.adapter_id,
            request_id=request_id,
            policy_epoch=policy_epoch,
            subjects=self.subjects[:-1] if base else self.subjects,
            limit_root=self.root,
            prompt_tokens=tokens,
            completion_tokens=0,
            amount_nano=amount_nano,
            sequences=sequences,
            session=session,
            counts_session=session is not None,
        )


async def admit(counters: Counters, request: ReservationRequest) -> Admitted:
    reply = await counters.reserve(request)
    assert isinstance(reply, Admitted), reply
    return reply


async def deny(counters: Counters, request: ReservationRequest) -> Denied:
    reply = await counters.reserve(request)
    assert isinstance(reply, Denied), reply
    return reply


def reserved_of(request: ReservationRequest, admitted: Admitted, epoch: int | None = None) -> Reservation:
    return Reservation(
        request=request,
        day=admitted.day,
        month=admitted.month,
        admitted_at=admitted.at,
        price=NO_PRICE,
        epoch=epoch,
    )


def usage_of(tokens: int, amount_nano: int = 0) -> SettledUsage:
    return SettledUsage(outcome="completed", prompt_tokens=tokens, amount_pico=amount_nano * PICO_PER_NANO)


def failed(reply: CounterReply) -> list[tuple[str, str]]:
    """(level, limit) of each decision against the request."""
    assert isinstance(reply, Denied), reply
    return [(decision.level, decision.name) for decision in reply.decisions if not decision.passed]


def decision(reply: Admitted | Denied, level: str, name: str) -> Decision:
    return next(found for found in reply.decisions if (found.level, found.name) == (level, name))


async def used(
    counters: Counters, tenant: LimitedTenant, session: str | None = None
) -> dict[tuple[str, str], LimitUse]:
    uses = await counters.read(tenant.tenant_id, tenant.subjects, session)
    assert uses is not None
    return {(use.level, use.name): use for use in uses}


async def keys_of(client: Redis, tenant_id: UUID) -> list[str]:
    return sorted([key.decode() async for key in client.scan_iter(f"{tenant_key(tenant_id)}*", count=1000)])


async def contents(client: Redis, tenant_id: UUID) -> dict[str, bytes]:
    """Every key of the tenant with its serialized value."""
    return {key: await client.dump(key) or b"" for key in await keys_of(client, tenant_id)}


async def age(client: Redis, tenant_id: UUID, seconds: float) -> None:
    """Moves every stored time of a tenant into the past, as if so much time had gone by."""
    shift = round(seconds * MICROSECONDS)
    for key in await keys_of(client, tenant_id):
        if key.endswith(":ended") or ":leases:" in key:
            for lease in await client.zrange(key, 0, -1):
                assert isinstance(lease, bytes)
                await client.zincrby(key, -shift, lease)
            continue
        if key.endswith(":open"):
            for field, record in (await client.hgetall(key)).items():
                assert isinstance(record, bytes)
                parts = record.decode().split()
                parts[6] = str(max(0, int(parts[6]) - shift))
                await client.hset(key, field, " ".join(parts))
            continue
        kind = "rate" if ":rate:" in key else key.rpartition(":")[2]
        for name in TIMES.get(kind, ()):
            stored = await client.hget(key, name)
            if stored is not None:
                await client.hset(key, name, str(max(0, int(stored) - shift)))


def limited(level: str, limits: QuotaLimits) -> LimitedTenant:
    tenant, group, key, adapter = (limits if each == level else NO_LIMITS for each in LEVELS)
    return LimitedTenant(tenant, key, adapter, group=group, root=uuid4() if level == "group" else None)


async def with_counters(counters: Counters, tenant: LimitedTenant) -> LimitedTenant:
    assert await counters.rebuild(tenant.tenant_id, 1, EMPTY) == 1
    return tenant
