"""A cluster of three Valkeys: everything of one tenant is on one of them, and every step works wherever that is."""

import asyncio
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import redis
from redis.asyncio import RedisCluster
from tests.platform.free_ports import free_ports
from tests.tenants.admission.gateways import TenantWithGateways, make_tenant_with_gateways, usage, used
from tests.tenants.counters.limited_tenant import EMPTY, LimitedTenant, admit, deny, reserved_of, usage_of
from tests.tenants.counters.limited_tenant import used as counted

from loraplex.platform.datastores.embedded.binaries import find_valkey
from loraplex.tenants.counters.counter_replies import CountersMissing, Settled
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.database import Database
from loraplex.tenants.errors import RateLimited
from loraplex.tenants.quotas.limits import QuotaLimits
from loraplex.tenants.valkey import open_valkey, ping, tenant_key

NODES = 3
SLOTS = 16_384
START_SECONDS = 180.0


@pytest.fixture
def cluster_ports(tmp_path: Path) -> Iterator[list[int]]:
    ports = free_ports(2 * NODES)
    ports, bus_ports = ports[:NODES], ports[NODES:]
    servers = [start_node(tmp_path, port, bus) for port, bus in zip(ports, bus_ports, strict=True)]
    nodes = [redis.Redis(port=port, socket_timeout=5.0) for port in ports]
    try:
        wait_until(lambda: all(answers(node) for node in nodes))
        for number, node in enumerate(nodes):
            first, after = (SLOTS * each // NODES for each in (number, number + 1))
            node.cluster("set-config-epoch", number + 1)
            node.cluster("addslotsrange", first, after - 1)
            if number:
                node.cluster("meet", "127.0.0.1", ports[0], bus_ports[0])
        wait_until(lambda: all(joined(node) for node in nodes))
        yield ports
    finally:
        for node in nodes:
            node.close()
        for server in servers:
            server.kill()
            server.wait()


def start_node(folder: Path, port: int, bus_port: int) -> subprocess.Popen[bytes]:
    settings = {
        "bind": "127.0.0.1",
        "port": port,
        "cluster-enabled": "yes",
        "cluster-port": bus_port,
        "cluster-config-file": f"nodes-{port}.conf",
        "dir": folder,
        "save": "",
    }
    arguments = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    return subprocess.Popen([find_valkey(), *arguments], stdout=subprocess.DEVNULL)


def answers(node: redis.Redis) -> bool:
    try:
        return bool(node.ping())
    except redis.ConnectionError:
        return False


def joined(node: redis.Redis) -> bool:
    info = node.cluster("info")
    return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == NODES


def wait_until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.02)


async def test_every_step_works_on_whatever_node_the_tenant_is(cluster_ports: list[int]) -> None:
    client = open_valkey(f"redis+cluster://127.0.0.1:{cluster_ports[0]}", command_s=10.0)
    assert isinstance(client, RedisCluster)
    await ping(client)
    counters = Counters(client, command_s=10.0, bulk_s=10.0)
    places = set[int]()
    while len(places) < 2:
        tenant = LimitedTenant(
            tenant=QuotaLimits(requests_per_minute=1, tokens_per_day=10),
            key=QuotaLimits(concurrent_requests=1),
        )
        places.add(client.keyslot(tenant_key(tenant.tenant_id, "state")) * NODES // SLOTS)
        await go_through_all_steps(counters, tenant)
    await client.aclose()


async def go_through_all_steps(counters: Counters, tenant: LimitedTenant) -> None:
    tenant_id, request = tenant.tenant_id, tenant.request()
    assert await counters.reserve(request) == CountersMissing()
    assert await counters.publish_policy(tenant_id, 1) == 1
    await counters.rebuild(tenant_id, 1, EMPTY)
    reserved = reserved_of(request, await admit(counters, request), 1)
    denied = await deny(counters, tenant.request(request_id="denied"))
    assert len([each for each in denied.decisions if not each.passed]) == 3
    assert await counters.explain(tenant_id, "denied") is not None
    assert (await counters.heartbeat(tenant_id, [reserved])).extended == {request.id}
    assert await counters.expired(tenant_id) == []
    assert await counters.reap(tenant_id, request.id, usage_of(0)) == Settled(False)
    assert await counters.settle(tenant_id, request.id, usage_of(4)) == Settled(True)
    assert (await counted(counters, tenant))["tenant", "tokens_per_day"].used == 4
    await counters.invalidate(tenant_id)
    assert await counters.read(tenant_id, tenant.subjects) is None


async def test_admissions_work_on_whatever_node_the_tenant_is(
    database: Database, cluster_ports: list[int]
) -> None:
    url = f"redis+cluster://127.0.0.1:{cluster_ports[0]}"
    client = open_valkey(url, command_s=10.0)
    assert isinstance(client, RedisCluster)
    await ping(client)
    places = set[int]()
    while len(places) < 2:
        name = f"tenant-{uuid4()}"
        tenant = await make_tenant_with_gateways(
            database, url, name, concurrent_requests=2, tokens_per_day=100
        )
        places.add(client.keyslot(tenant_key(tenant.tenant_id, "state")) * NODES // SLOTS)
        await go_through_a_life(tenant, client)
    await client.aclose()


async def go_through_a_life(tenant: TenantWithGateways, client: RedisCluster) -> None:
    """Two gateways rebuild together, admit, renew leases, refuse, lose the counters, and settle."""
    async with tenant.gateway() as first, tenant.gateway() as second:
        admitted = await asyncio.gather(first.admit(tenant.request()), second.admit(tenant.request()))
        assert [each.epoch for each in admitted] == [1, 1] and not any(each.degraded for each in admitted)
        for gateway in (first, second):
            await gateway.maintenance.heartbeat()
        refused = tenant.request()
        with pytest.raises(RateLimited):
            await first.admit(refused)
        explanation = await second.explain(tenant.tenant_id, refused.request_id)
        assert explanation is not None
        await first.settle(admitted[0], usage(admitted[0]))
        uses = await used(second, tenant.tenant_id)
        assert (uses["tokens_per_day"].used, uses["tokens_per_day"].reserved) == (15, 30)
        await client.delete(tenant_key(tenant.tenant_id, "state"), tenant_key(tenant.tenant_id, "seeding"))
        lasting = await first.admit(tenant.request())
        assert (lasting.epoch, lasting.degraded) == (2, False)
        await second.settle(admitted[1], usage(admitted[1]))
        await first.settle(lasting, usage(lasting))
        uses = await used(second, tenant.tenant_id)
        assert (uses["tokens_per_day"].used, uses["tokens_per_day"].reserved) == (45, 0)
        assert uses["concurrent_requests"].used == 0
