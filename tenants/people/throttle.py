"""Slows failed sign-ins, per account and per client network, and never locks an account.

Invariant: a try is counted before its password is compared, so that tries at the same time are counted too. An account at a
network that it has signed in from is slowed by a count of its own, which no failure of others touches.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import case, delete, func, select, update
from sqlalchemy.dialects.postgresql import Insert, insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import SignInSlowed
from loraplex.tenants.models import SignInThrottle

FREE_TRIES: Final = 10
FIRST_WAIT_S: Final = 2
MAX_WAIT_S: Final = 300
FORGOTTEN: Final = timedelta(hours=1)
"""The time without a failure after which those of before count no longer."""
KNOWN: Final = timedelta(days=30)
"""The time for which an account is known from a network, from its last sign-in there."""

Count = tuple[int, datetime]
"""Failures, and the time of the last one."""


def subject(*parts: str) -> bytes:
    """Return the digest under which failures are counted."""
    return hashlib.sha256("\0".join(parts).encode()).digest()


def wait_s(failures: int) -> int:
    """Return the seconds between the last of so many failures and the next try."""
    excess = failures - FREE_TRIES
    return 0 if excess < 0 else min(MAX_WAIT_S, FIRST_WAIT_S << min(excess, 16))


class SignInTries:
    """The tries on one account from one network, seen by a session of the gateway's role."""

    def __init__(self, session: AsyncSession, email: str, network: str, *, purpose: str = "") -> None:
        """`purpose`: of tries that are no sign-ins; each is counted apart, so that no sign-in slows another one."""
        self._session = session
        self._account = subject(f"{purpose}account", email)
        self._known = subject(f"{purpose}known", email, network)
        self._network = subject(f"{purpose}network", network)
        self._all = (self._account, self._known, self._network)

    async def take(self, now: datetime) -> None:
        """Count one try, until `give_back`. Raises `SignInSlowed`; a slowed try is not counted.

        A try that the first read finds slowed locks nothing, so that a flood of them delays no other try.
        """
        seen = await self._counts(self._all)
        subjects, slowing = self._subjects(seen, now)
        self._refuse_slowed(seen, slowing, now)
        # Others may have counted since the read, which took no lock.
        self._refuse_slowed(await self._locked(subjects, now), slowing, now)
        present = case((SignInThrottle.updated_at < now - FORGOTTEN, 0), else_=SignInThrottle.failures)
        # A row that a sign-in deleted before it was locked is inserted again.
        one_more = self._inserted(subjects, 1, now).on_conflict_do_update(
            index_elements=["subject"], set_={"failures": present + 1, "updated_at": now}
        )
        await self._session.execute(one_more)

    async def give_back(self, now: datetime) -> None:
        """Undo one `take`: the try was no failure. What was counted elsewhere stays."""
        # All that `succeed` changes, in the order of `take`: two sign-ins at once wait for each other and never deadlock.
        seen = await self._counts(self._all, lock=True)
        counted = SignInThrottle.subject.in_(self._subjects(seen, now)[0])
        fewer = func.greatest(SignInThrottle.failures - 1, 0)
        await self._session.execute(update(SignInThrottle).where(counted).values(failures=fewer))

    async def succeed(self, now: datetime) -> None:
        """Forget the account's failures, and know it from this network."""
        await self.give_back(now)
        await self._session.execute(delete(SignInThrottle).where(SignInThrottle.subject == self._account))
        values = {"failures": 0, "updated_at": now}
        statement = insert(SignInThrottle).values(subject=self._known, **values)
        await self._session.execute(statement.on_conflict_do_update(index_elements=["subject"], set_=values))

    def _subjects(self, seen: Mapping[bytes, Count], now: datetime) -> tuple[list[bytes], list[bytes]]:
        """Return what a try is counted under, and which of these slow it.

        The network's count does not slow a known account there: failures of others must not keep its owner waiting.
        """
        if self._known in seen and seen[self._known][1] > now - KNOWN:
            return [self._known, self._network], [self._known]
        both = [self._account, self._network]
        return both, both

    async def _locked(self, subjects: Sequence[bytes], now: datetime) -> dict[bytes, Count]:
        """Return what is counted, locked until the transaction ends."""
        await self._session.execute(self._inserted(subjects, 0, now).on_conflict_do_nothing())
        return await self._counts(subjects, lock=True)

    def _inserted(self, subjects: Sequence[bytes], failures: int, now: datetime) -> Insert:
        rows = [{"subject": each, "failures": failures, "updated_at": now} for each in sorted(subjects)]
        return insert(SignInThrottle).values(rows)

    async def _counts(self, subjects: Sequence[bytes], *, lock: bool = False) -> dict[bytes, Count]:
        """Return what is counted, of those that have a row. `lock`: until the transaction ends, in one order for all."""
        query = select(SignInThrottle.subject, SignInThrottle.failures, SignInThrottle.updated_at)
        query = query.where(SignInThrottle.subject.in_(subjects)).order_by(SignInThrottle.subject)
        rows = await self._session.execute(query.with_for_update() if lock else query)
        return {each: (failures, last) for each, failures, last in rows}

    def _refuse_slowed(self, counts: Mapping[bytes, Count], slowing: Sequence[bytes], now: datetime) -> None:
        """Raise `SignInSlowed` where a subject must wait."""
        wait = max(self._remaining(*counts.get(each, (0, now)), now) for each in slowing)
        if wait > 0:
            raise SignInSlowed(wait)

    def _remaining(self, failures: int, last: datetime, now: datetime) -> int:
        """Never more than the whole wait, so that no clock that was ahead delays a sign-in."""
        wait = wait_s(failures)
        return min(wait, math.ceil(wait - (now - last).total_seconds()))
