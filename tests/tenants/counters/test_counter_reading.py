"""The use of very many subjects is read by several scripts, under one epoch, so that other tenants' scripts run in between."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import uuid4

from redis.asyncio import Redis
from tests.tenants.counters.limited_tenant import EMPTY, LimitedTenant, admit

from loraplex.tenants.counters.counter_replies import LimitUse
from loraplex.tenants.counters.counters import SUBJECTS_AT_ONCE, Counters
from loraplex.tenants.counters.script_runner import Script, ScriptRunner
from loraplex.tenants.quotas.limits import COUNTED, QuotaLimits, Subject


async def with_counters(counters: Counters) -> LimitedTenant:
    tenant = LimitedTenant()
    assert await counters.rebuild(tenant.tenant_id, 1, EMPTY) == 1
    return tenant


class Watched(ScriptRunner):
    """Counts what one script reads; `between` happens after the first."""

    subjects: list[int]

    def __init__(self, client: Redis, between: Callable[[], Awaitable[object]] | None) -> None:
        super().__init__(client, 10.0)
        self.subjects, self._between = [], between

    async def run(
        self, script: Script, state_key: str, arguments: Sequence[str | int], **bounds: float | None
    ) -> Any:
        reply = await super().run(script, state_key, arguments, **bounds)
        self.subjects.append((len(arguments) - 1) // 3)
        if self._between is not None and len(self.subjects) == 1:
            await self._between()
        return reply


async def read_watched(
    client: Redis, tenant: LimitedTenant, between: Callable[[], Awaitable[object]] | None = None
) -> tuple[list[LimitUse] | None, list[int]]:
    """The use of the tenant and 150 further keys, and how many subjects each script reads."""
    more = [Subject("key", uuid4(), QuotaLimits(tokens_per_day=5)) for _ in range(150)]
    counters = Counters(client)
    counters._bulk = watched = Watched(client, between)
    return await counters.read(tenant.tenant_id, [*tenant.subjects, *more]), watched.subjects


async def test_a_script_reads_a_bounded_number_of_subjects(client: Redis, counters: Counters) -> None:
    tenant = await with_counters(counters)
    await admit(counters, tenant.request())
    uses, read = await read_watched(client, tenant)
    assert uses is not None and len(uses) == 153 * (len(COUNTED) - 1)
    assert sum(read) == 153 and max(read) <= SUBJECTS_AT_ONCE
    running = {use.level: use.used for use in reversed(uses) if use.name == "concurrent_requests"}
    assert running == {"tenant": 1, "key": 1, "adapter": 1}


async def test_a_read_by_several_scripts_is_of_one_epoch(client: Redis, counters: Counters) -> None:
    tenant = await with_counters(counters)
    await admit(counters, tenant.request())
    uses, read = await read_watched(client, tenant, lambda: counters.rebuild(tenant.tenant_id, 2, EMPTY))
    assert sum(read) == 2 * 153 and uses is not None and {use.used for use in uses if not use.limit} == {0}
    assert (await read_watched(client, tenant, lambda: counters.invalidate(tenant.tenant_id)))[0] is None
