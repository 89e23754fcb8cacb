"""Keys found a moment ago. Invariant: an entry is as old as the beginning of the query that found it, and never older than
`seconds`; unknown ids, which anybody can make up, have a room of their own and push out no key that exists.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from loraplex.tenants.api_keys.keys import AuthenticatedKey

MAX_KEYS: Final = 10_000
MAX_UNKNOWN: Final = 1_000


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a query found: a key, or that there is none."""

    found: AuthenticatedKey | None
    until: float


class KeyCache:
    """By public id; a tenant's keys are forgotten together."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._known: OrderedDict[str, Lookup] = OrderedDict()
        self._unknown: OrderedDict[str, Lookup] = OrderedDict()
        self._of_tenant: defaultdict[UUID | None, set[str]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self._known) + len(self._unknown)

    def get(self, key_id: str) -> Lookup | None:
        """None when nothing recent is known of the id."""
        lookup = self._known.get(key_id) or self._unknown.get(key_id)
        return lookup if lookup is not None and self._clock() < lookup.until else None

    def deadline(self) -> float:
        """Until when a query that begins now may be believed."""
        return self._clock() + self._seconds

    def put(self, key_id: str, lookup: Lookup) -> None:
        """An older query never replaces what a younger one found."""
        before = self._known.get(key_id)
        if before is not None and before.until > lookup.until:
            return
        self._drop(key_id)
        if lookup.found is None:
            self._unknown[key_id] = lookup
            if len(self._unknown) > MAX_UNKNOWN:
                self._unknown.popitem(last=False)
            return
        self._known[key_id] = lookup
        self._of_tenant[lookup.found.tenant_id].add(key_id)
        if len(self._known) > MAX_KEYS:
            self._drop(next(iter(self._known)))

    def forget(self, tenant_id: UUID) -> None:
        """Every key of the tenant is looked up anew."""
        for key_id in [*self._of_tenant.get(tenant_id, ())]:
            self._drop(key_id)

    def _drop(self, key_id: str) -> None:
        self._unknown.pop(key_id, None)
        lookup = self._known.pop(key_id, None)
        if lookup is None or lookup.found is None:
            return
        others = self._of_tenant[lookup.found.tenant_id]
        others.discard(key_id)
        if not others:
            del self._of_tenant[lookup.found.tenant_id]
