"""How many upload bodies a gateway reads at once, in all and of one tenant: no tenant takes the disk from the others."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from loraplex.adapters.limits import UploadLimits
from loraplex.platform.errors import Overloaded


class UploadSlots:
    """Taken before the first byte of a body is read."""

    def __init__(self, limits: UploadLimits) -> None:
        self._limits = limits
        self._taken: Counter[UUID] = Counter()

    @contextmanager
    def taken(self, tenant_id: UUID) -> Iterator[None]:
        """Raises `Overloaded`."""
        if self._taken[tenant_id] >= self._limits.max_in_flight_per_tenant:
            raise Overloaded(
                f"This tenant is sending {self._limits.max_in_flight_per_tenant} uploads at once, which is the most; try again."
            )
        if self._taken.total() >= self._limits.max_in_flight:
            raise Overloaded("The server receives as many uploads as it can; try again.")
        self._taken[tenant_id] += 1
        try:
            yield
        finally:
            self._taken[tenant_id] -= 1
            self._taken += Counter()
