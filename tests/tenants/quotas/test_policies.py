"""Policies are read once per epoch, and never applied to a request of another."""

import asyncio
from uuid import UUID

import pytest

from loraplex.tenants.errors import PolicyStale
from loraplex.tenants.quotas.policies import Policies, TenantPolicy

TENANT = UUID(int=1)


class Store:
    """What the database says, slowly."""

    epoch = 1
    reads = 0

    async def load(self, tenant_id: UUID) -> TenantPolicy:
        self.reads += 1
        epoch = self.epoch
        await asyncio.sleep(0.001)
        return TenantPolicy(epoch)


async def test_many_that_miss_it_read_it_once() -> None:
    store = Store()
    policies = Policies(store.load)
    await asyncio.gather(*(policies.of(TENANT, 1) for _ in range(20)))
    store.epoch = 2
    await asyncio.gather(*(policies.of(TENANT, 2) for _ in range(20)))
    assert store.reads == 2


async def test_a_caller_of_another_epoch_is_stale() -> None:
    store = Store()
    policies = Policies(store.load)
    store.epoch = 2
    for _ in range(2):
        with pytest.raises(PolicyStale):
            await policies.of(TENANT, 1)
    assert (await policies.of(TENANT, 2)).policy_epoch == 2


async def test_the_least_used_are_forgotten() -> None:
    store = Store()
    policies = Policies(store.load, most_tenants=2)
    for number in (1, 2, 1, 3, 1, 2):
        await policies.of(UUID(int=number), 1)
    assert store.reads == 4
