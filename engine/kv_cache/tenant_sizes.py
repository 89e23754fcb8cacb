"""`TenantSizes`: how many entries of a shared cache each tenant has, and which has the most: whose is evicted next.

Invariant: every tenant of the same size is in one class. A change takes amortised constant time, however many tenants there are.
"""

from collections import OrderedDict


class TenantSizes:
    """Numbers of entries by tenant; one without entries is not known."""

    def __init__(self) -> None:
        self._sizes: dict[bytes, int] = {}
        self._classes: dict[int, OrderedDict[bytes, None]] = {}
        self._largest = 0

    def change(self, namespace: bytes, by: int) -> None:
        """Add to a tenant's number, or subtract."""
        before = self._sizes.pop(namespace, 0)
        after = before + by
        if before:
            self._leave(namespace, before)
        if after:
            self._sizes[namespace] = after
            self._classes.setdefault(after, OrderedDict())[namespace] = None
        self._largest = max(self._largest, after)
        while self._largest and self._largest not in self._classes:
            self._largest -= 1

    def largest(self, preferred: bytes | None = None) -> bytes:
        """Return the tenant with the most entries: of several `preferred`, else the one that has had so many for the longest.

        Raises `KeyError` where no tenant has an entry.
        """
        tenants = self._classes[self._largest]
        if preferred is not None and preferred in tenants:
            return preferred
        return next(iter(tenants))

    def _leave(self, namespace: bytes, size: int) -> None:
        equals = self._classes[size]
        del equals[namespace]
        if not equals:
            del self._classes[size]
