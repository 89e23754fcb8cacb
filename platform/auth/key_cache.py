"""Caches the look-ups of API keys.

Invariants: the age of a valid entry counts from the beginning of its query, and is at most `seconds`; that of a known key at
most `known_s`. Unknown ids, which any client can invent, have their own space and displace no existing key. In a full cache
the tenant with the most keys loses one.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Final
from uuid import UUID

from cachetools import LRUCache

from loraplex.tenants.api_keys.keys import AuthenticatedKey

MAX_KEYS: Final = 10_000
MAX_UNKNOWN: Final = 1_000


@dataclass(frozen=True, slots=True)
class Lookup:
    """The result of a query: a key, or None. It is valid until `until` on the cache's clock."""

    found: AuthenticatedKey | None
    until: float


class KeyCache:
    """Look-ups by public id; the keys of a tenant expire together."""

    def __init__(self, seconds: float, clock: Callable[[], float], known_s: float = 0.0) -> None:
        self._seconds = seconds
        self._known_s = known_s
        self._clock = clock
        self._known: dict[str, Lookup] = {}
        self._unknown: LRUCache[str, Lookup] = LRUCache(MAX_UNKNOWN)
        self._of_tenant: defaultdict[UUID | None, dict[str, None]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._known) + len(self._unknown)

    def get(self, key_id: str) -> Lookup | None:
        """Return a valid look-up of the id, or None."""
        lookup = self._known.get(key_id) or self._unknown.get(key_id)
        return lookup if lookup is not None and self._clock() < lookup.until else None

    def last_found(self, key_id: str) -> AuthenticatedKey | None:
        """Return the key as it was last found, however long ago. Only its id, secret and tenant are certainly as they were."""
        lookup = self._known.get(key_id)
        return None if lookup is None else lookup.found

    def known(self, key_id: str) -> AuthenticatedKey | None:
        """Return a key that was found by a query of the last `known_s` seconds, and not forgotten since; else None."""
        lookup = self._known.get(key_id)
        if lookup is None or self._clock() >= lookup.until - self._seconds + self._known_s:
            return None
        return lookup.found

    def deadline(self) -> float:
        """Return until when the result of a query that begins now is valid."""
        return self._clock() + self._seconds

    def put(self, key_id: str, lookup: Lookup) -> None:
        """Store a look-up. An older query never replaces the result of a newer one."""
        before = self._known.get(key_id)
        if before is not None and before.until > lookup.until:
            return
        self._drop(key_id)
        if lookup.found is None:
            self._unknown[key_id] = lookup
            return
        self._known[key_id] = lookup
        self._of_tenant[lookup.found.tenant_id][key_id] = None
        if len(self._known) > MAX_KEYS:
            most = max(self._of_tenant.values(), key=len)
            self._drop(next(iter(most)))

    def forget(self, tenant_id: UUID, policy_epoch: float = inf) -> None:
        """Let the look-ups of the tenant's keys expire that found its policy at `policy_epoch` or an older one.

        None of these keys is known until it is found again.
        """
        for key_id in self._of_tenant.get(tenant_id, ()):
            lookup = self._known[key_id]
            if lookup.found is not None and (lookup.found.policy_epoch or 0) <= policy_epoch:
                self._known[key_id] = replace(lookup, until=-inf)

    def _drop(self, key_id: str) -> None:
        self._unknown.pop(key_id, None)
        lookup = self._known.pop(key_id, None)
        if lookup is None or lookup.found is None:
            return
        others = self._of_tenant[lookup.found.tenant_id]
        del others[key_id]
        if not others:
            del self._of_tenant[lookup.found.tenant_id]
