"""A journal in memory, for tests of what uses one. It forgets what is shipped, as the real one does."""

from collections.abc import Sequence
from uuid import UUID, uuid4

from loraplex.tenants.errors import JournalFull
from loraplex.tenants.ledger.journal.journal import Journal
from loraplex.tenants.ledger.journal.records import Admitted, Ended, JournalRecord, OpenRequest
from loraplex.tenants.quotas.reservation import NOTHING_USED, Reservation, SettledUsage


class MemoryJournal(Journal):
    """`open_now` are admitted requests that have not ended. With `full`, nothing is admitted."""

    def __init__(self) -> None:
        self.full = False
        self._position = 0
        self.is_closed = False
        self.gateway_id = uuid4()
        self.open_now: dict[UUID, OpenRequest] = {}
        self.rejected: list[JournalRecord] = []
        self._records: list[JournalRecord] = []

    @property
    def is_full(self) -> bool:
        return self.full

    @property
    def stalled_s(self) -> float:
        return 0.0

    @property
    def position(self) -> int:
        return self._position

    async def admit(self, reservation: Reservation) -> None:
        if self.full:
            raise JournalFull("the journal is full")
        assert reservation.id not in self.open_now
        self.open_now[reservation.id] = OpenRequest(reservation, NOTHING_USED)
        self._position += 1
        self._records.append(Admitted(self._position, reservation))

    def progress(self, reservation_id: UUID, usage: SettledUsage) -> None:
        self.open_now[reservation_id] = OpenRequest(self.open_now[reservation_id].reservation, usage)

    async def end(self, reservation_id: UUID, usage: SettledUsage) -> bool:
        if reservation_id not in self.open_now:
            return False
        reservation = self.open_now.pop(reservation_id).reservation
        self._position += 1
        self._records.append(Ended(self._position, reservation, usage))
        return True

    async def unshipped(self, limit: int) -> Sequence[JournalRecord]:
        return self._records[:limit]

    async def reject(self, position: int, reason: str) -> None:
        self.rejected += [each for each in self._records if each.position == position]

    async def shipped(self, position: int) -> None:
        self._records = [each for each in self._records if each.position > position]

    async def close(self) -> None:
        self.is_closed = True
