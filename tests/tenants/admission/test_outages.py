"""Valkey hangs: requests hardly wait, rates are shared out, budgets are refused, and nothing is forgotten afterwards."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psycopg
import pytest
import redis
from structlog.testing import capture_logs
from tests.tenants.admission.gateways import (
    PRICE,
    all_shipped,
    check_ledger,
    closed,
    make_tenant_with_gateways,
    plain,
    set_limits,
    usage,
    used,
)

from loraplex.platform.datastores.embedded.binaries import find_valkey
from loraplex.platform.datastores.embedded.servers import EmbeddedServices
from loraplex.tenants.admission.config import AdmissionConfig
from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.api_keys.keys import AuthenticatedKey
from loraplex.tenants.circuit_breaker import FAILURES
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable, QuotaUnavailable, RateLimited, StoreUnavailable
from loraplex.tenants.quotas.reservation import Reservation

SETTINGS = AdmissionConfig(valkey_s=0.3)
START_SECONDS = 180.0
REQUESTS, SHARE = 60, 25
CALLERS, CALLS = 16, 20
HANG = "LOCK TABLE tenants, reservations, usage_records, admission_epochs, gateways IN ACCESS EXCLUSIVE MODE"


@dataclass(frozen=True)
class OwnValkey:
    """A server that tests may stop and let go on, or end."""

    url: str
    pid: int

    @contextmanager
    def gone(self) -> Iterator[None]:
        """Ended for good: connections are refused."""
        os.kill(self.pid, signal.SIGKILL)
        yield

    @contextmanager
    def hanging(self) -> Iterator[None]:
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[OwnValkey]:
    socket = tmp_path / "valkey.sock"
    arguments = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(tmp_path)]
    server = subprocess.Popen([find_valkey(), *arguments], stdout=subprocess.DEVNULL)
    url = f"unix://{socket}"
    deadline = time.monotonic() + START_SECONDS
    with redis.Redis.from_url(url) as client:
        while not _answers(client):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    yield OwnValkey(url, server.pid)
    server.kill()
    server.wait()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


async def until_available(gateway: QuotaAdmissionController) -> None:
    while gateway.maintenance.breaker.is_open:
        await gateway.maintenance.probe()
        await asyncio.sleep(0.01)


async def all_updated(gateway: QuotaAdmissionController) -> None:
    await all_shipped(gateway)
    while gateway.maintenance.requests.pending_counter_updates:
        await gateway.maintenance.settlements.retry()
        await until_available(gateway)


async def test_rates_are_shared_out_while_valkey_hangs(database: Database, own_valkey: OwnValkey) -> None:
    tenant = await make_tenant_with_gateways(database, own_valkey.url, requests_per_minute=2 * SHARE)
    admitted: list[Reservation] = []

    async with tenant.gateway(SETTINGS) as gateway, tenant.gateway(SETTINGS) as other:
        for each in (other, gateway, other):
            await each.maintenance.heartbeat()
        running = await gateway.admit(tenant.request())
        with own_valkey.hanging():
            began = time.monotonic()
            for _ in range(REQUESTS):
                try:
                    admitted.append(await gateway.admit(tenant.request()))
                except RateLimited as error:
                    assert error.limit == "requests_per_minute"
            refilled = (time.monotonic() - began) * SHARE / 60
            assert SHARE <= len(admitted) <= SHARE + refilled
            assert all(reservation.degraded for reservation in admitted)
            of_share = ("tenant", "requests_per_minute", SHARE)
            assert [each.limits[0][:3] for each in admitted[:2]] == [of_share, of_share]
            assert admitted[0].limits[0].used == 0
            for reservation in [running, *admitted[:20]]:
                await gateway.settle(reservation, usage(reservation))
            await tenant.shipped()
            assert len(gateway.maintenance.requests.pending_counter_updates) == 21
        await until_available(gateway)
        uses = await used(gateway, tenant.tenant_id)
        assert uses["concurrent_requests"].used >= len(admitted) - 20, "what runs is known again"
        for reservation in admitted[20:]:
            await gateway.settle(reservation, usage(reservation))
        lasting = await gateway.admit(tenant.request())
        assert not lasting.degraded
        await gateway.settle(lasting, usage(lasting))
        await all_updated(gateway)
        assert (await used(gateway, tenant.tenant_id))["tokens_per_day"].used == 15 * (len(admitted) + 2)


@pytest.mark.parametrize("outage", [OwnValkey.hanging, OwnValkey.gone])
async def test_no_caller_waits_for_valkey_once_three_calls_in_a_row_have_failed(
    database: Database, own_valkey: OwnValkey, outage: Callable[[OwnValkey], AbstractContextManager[None]]
) -> None:
    """The bound itself is asserted in `test_reserve.py`, on an artificial clock; here it is printed (`pytest -s`)."""
    tenant = await make_tenant_with_gateways(database, own_valkey.url)
    waits: list[float] = []

    async def call(gateway: QuotaAdmissionController) -> None:
        for _ in range(CALLS):
            begun = time.monotonic()
            reservation = await gateway.admit(tenant.request())
            waits.append(time.monotonic() - begun)
            assert reservation.degraded
            await gateway.settle(reservation, usage(reservation))

    async with tenant.gateway(SETTINGS) as gateway:
        await gateway.settle(first := await gateway.admit(tenant.request()), usage(first))
        with outage(own_valkey), capture_logs() as logs:
            await asyncio.gather(*(call(gateway) for _ in range(CALLERS)))
    waited = [
        line for line in logs if line["event"] == "Valkey did not answer; admitting without the counters"
    ]
    assert gateway.maintenance.breaker.is_open and FAILURES <= 2 * len(waited) <= 2 * FAILURES * CALLERS
    half, last = (sorted(waits)[len(waits) * part // 100] for part in (50, 99))
    print(f"{outage.__name__}: an admission took {1e3 * half:.1f} ms at p50, {1e3 * last:.1f} ms at p99")


async def test_budgets_fail_closed_while_valkey_hangs(database: Database, own_valkey: OwnValkey) -> None:
    tenant = await make_tenant_with_gateways(database, own_valkey.url, budget_per_month=1000)
    async with tenant.gateway(SETTINGS) as gateway:
        reservation = await gateway.admit(tenant.request())
        with own_valkey.hanging():
            for _ in range(5):
                with pytest.raises(QuotaUnavailable):
                    await gateway.admit(tenant.request())
            assert gateway.maintenance.breaker.is_open
            await gateway.settle(reservation, usage(reservation))
        await until_available(gateway)
        await all_updated(gateway)
        assert await check_ledger(tenant, gateway) == (15, 1)


async def test_denials_without_valkey_are_explained(database: Database, own_valkey: OwnValkey) -> None:
    tenant = await make_tenant_with_gateways(
        database, own_valkey.url, requests_per_minute=2, concurrent_requests=9
    )
    async with tenant.gateway(SETTINGS) as gateway:

        async def refused(kind: type[Exception], key: AuthenticatedKey) -> str:
            request = tenant.request(key=key)
            with pytest.raises(kind):
                await gateway.admit(request)
            return request.request_id

        with own_valkey.hanging():
            for _ in range(2):
                await gateway.cancel(await gateway.admit(tenant.request()))
            rated = await refused(RateLimited, tenant.key)
            key = await set_limits(tenant, tokens_per_day=100, budget_per_month=7)
            unknown = await refused(QuotaUnavailable, key)
            assert gateway.degraded
            explained = [await gateway.explain(tenant.tenant_id, each) for each in (rated, unknown)]
        await until_available(gateway)
        for each, request_id in zip(explained, (rated, unknown), strict=True):
            assert each is not None and each.degraded
            assert await gateway.explain(tenant.tenant_id, request_id) == each
        assert explained[0] is not None and explained[1] is not None
        failed = [each.name for each in explained[0].decisions if not each.passed]
        assert failed == ["requests_per_minute"] and len(explained[0].decisions) == 2
        amount = -(-PRICE.bound_nano(10, 20) // 1000)
        assert [(each.name, each.limit, each.asked) for each in explained[1].unknown] == [
            ("tokens_per_day", 100, 30),
            ("budget_per_month", 7, amount),
        ]
        assert await gateway.explain(tenant.tenant_id, "never") is None


async def test_a_new_valkey_is_rebuilt_with_what_was_admitted_without_it(
    database: Database, own_valkey: OwnValkey
) -> None:
    tenant = await make_tenant_with_gateways(database, own_valkey.url, concurrent_requests=5)
    async with tenant.gateway(SETTINGS) as gateway:
        with own_valkey.hanging():
            first, second = [await gateway.admit(tenant.request()) for _ in range(2)]
            await gateway.settle(first, usage(first))
        await until_available(gateway)
        await tenant.shipped()
        await tenant.flush()
        newer = await set_limits(tenant, tokens_per_day=50)
        lasting = await gateway.admit(tenant.request(5, 0, key=newer))
        uses = await used(gateway, tenant.tenant_id)
        assert (uses["tokens_per_day"].used, uses["tokens_per_day"].reserved) == (15, 35)
        for reservation in (second, lasting):
            await gateway.settle(reservation, usage(reservation, completion=0))
        await all_updated(gateway)
        assert await check_ledger(tenant, gateway) == (35, 3)


async def test_no_request_waits_for_a_postgresql_that_hangs(database: Database, valkey_url: str) -> None:
    """It is connected and silent: whatever waited for it would fail after seconds."""
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=10_000)
    provisional: list[int] = []
    async with tenant.gateway() as gateway:
        running = await gateway.admit(tenant.request())
        await tenant.shipped()
        async with await psycopg.AsyncConnection.connect(plain(database.url)) as hanging:
            await hanging.execute(HANG)
            for number in range(20):
                reservation = await gateway.admit(tenant.request(), partial(provisional.append, number))
                await gateway.settle(reservation, usage(reservation))
            await gateway.settle(running, usage(running))
            assert provisional == [*range(20)]
            assert len(gateway.maintenance.requests.early) == 21
        assert await check_ledger(tenant, gateway) == (15 * 21, 21)


async def test_without_both_stores_nobody_is_admitted(
    database: Database, own_valkey: OwnValkey, embedded_services: EmbeddedServices
) -> None:
    tenant = await make_tenant_with_gateways(database, own_valkey.url)
    async with tenant.gateway(SETTINGS) as gateway:
        running = await gateway.admit(tenant.request())
        async with closed(embedded_services, database):
            with own_valkey.hanging():
                for _ in range(3):
                    with pytest.raises(DatabaseUnavailable):
                        await gateway.admit(tenant.request())
                await gateway.settle(running, usage(running))
        await until_available(gateway)
        await all_updated(gateway)
        assert await check_ledger(tenant, gateway) == (15, 1)


async def test_counters_that_are_lost_while_postgresql_is_away_admit_nothing(
    database: Database, valkey_url: str, embedded_services: EmbeddedServices
) -> None:
    tenant = await make_tenant_with_gateways(database, valkey_url, tokens_per_day=70)
    async with tenant.gateway() as gateway:
        running, ended = [await gateway.admit(tenant.request()) for _ in range(2)]
        async with closed(embedded_services, database):
            await gateway.settle(ended, usage(ended))
            await tenant.flush()
            with pytest.raises(StoreUnavailable):
                await gateway.admit(tenant.request())
        with pytest.raises(RateLimited):
            await gateway.admit(tenant.request(prompt=10, completion=16))
        last = await gateway.admit(tenant.request(prompt=10, completion=15))
        for reservation in (running, last):
            await gateway.settle(reservation, usage(reservation))
        assert await check_ledger(tenant, gateway) == (45, 3)
