"""`CachedBlocks`: the unreferenced blocks whose content is kept, by tenant, and which of them is evicted next.

Invariant: a tenant that used its cache within `IDLE_S` loses a block only while no tenant has more cached blocks
(max-min fairness, Bertsekas and Gallager, Data Networks, 6.5.2). Every operation is O(1).
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from loraplex.engine.kv_cache.tenant_sizes import TenantSizes

IDLE_S: Final = 300.0
"""Seconds after which a tenant's unused blocks are evicted before those of others."""


class _TenantBlocks:
    """One tenant's cached blocks, the one released longest ago first."""

    __slots__ = ("blocks", "used_at")

    def __init__(self) -> None:
        self.blocks: OrderedDict[int, None] = OrderedDict()
        self.used_at = 0.0


class CachedBlocks:
    """Cached blocks of all tenants. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._owners: dict[int, bytes] = {}
        # The tenant that used its cache longest ago first.
        self._tenants: OrderedDict[bytes, _TenantBlocks] = OrderedDict()
        self._sizes = TenantSizes()

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, block: int) -> bool:
        return block in self._owners

    def add(self, block: int, namespace: bytes) -> None:
        """Add a block that a tenant has just released."""
        tenant = self._tenants.get(namespace)
        if tenant is None:
            tenant = self._tenants[namespace] = _TenantBlocks()
        tenant.blocks[block] = None
        self._owners[block] = namespace
        self._sizes.change(namespace, 1)
        tenant.used_at = self._clock()
        self._tenants.move_to_end(namespace)

    def reuse(self, block: int) -> None:
        """Remove a block that its tenant has found. Raises `KeyError` for a block that is not cached."""
        namespace = self._owners[block]
        tenant = self._tenants[namespace]
        tenant.used_at = self._clock()
        self._tenants.move_to_end(namespace)
        self.remove(block)

    def remove(self, block: int) -> None:
        """Remove a block whose content is not kept. Raises `KeyError` for a block that is not cached."""
        namespace = self._owners.pop(block)
        tenant = self._tenants[namespace]
        del tenant.blocks[block]
        self._sizes.change(namespace, -1)
        if not tenant.blocks:
            del self._tenants[namespace]

    def next_victim(self, requester: bytes) -> int:
        """Return the block to evict for a request of `requester`. Raises `StopIteration` when nothing is cached.

        It is the oldest one of the tenant that is idle longest, or of the tenant with the most cached blocks; of several such
        tenants, the requester pays.
        """
        namespace, tenant = next(iter(self._tenants.items()))
        if self._clock() - tenant.used_at <= IDLE_S:
            namespace = self._sizes.largest(requester)
        return next(iter(self._tenants[namespace].blocks))
