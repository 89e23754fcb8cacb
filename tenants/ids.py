"""UUIDs: new ones sort by their time of creation (version 7, RFC 9562, with a fraction of the millisecond in `rand_a`)."""

import secrets
import time
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID, uuid5

_MILLISECOND: Final = 1_000_000
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
CLOCKS_APART: Final = timedelta(minutes=5)
"""How far the clock of a gateway, in an id, and that of the counters, in a time of admission, are apart at most as a rule."""
WRONG_CLOCK: Final = timedelta(days=1)
"""How far they may be apart: one may have jumped, or show the time of another zone."""
FIRST_TIME: Final = datetime(2020, 1, 1, tzinfo=UTC)
LAST_TIME: Final = datetime(2100, 1, 1, tzinfo=UTC)
"""Ids of rows outside contain no time: releases before the ledger had partitions derived some from other ids."""


def uuid7_from(time: datetime) -> UUID:
    """The smallest UUID created at this time or later."""
    milliseconds = (time - EPOCH) // timedelta(milliseconds=1)
    return UUID(int=(milliseconds & ((1 << 48) - 1)) << 80 | 7 << 76 | 0b10 << 62)


def canonical_uuid(text: str) -> UUID | None:
    """Parse a UUID in canonical form; None for any other text."""
    try:
        parsed = UUID(text)
    except ValueError:
        return None
    return parsed if str(parsed) == text else None


def uuid7() -> UUID:
    """A new UUID. Of two from one process, the later is greater if they are a quarter of a microsecond apart."""
    milliseconds, nanoseconds = divmod(time.time_ns(), _MILLISECOND)
    fraction = (nanoseconds << 12) // _MILLISECOND
    value = (milliseconds & ((1 << 48) - 1)) << 80 | 7 << 76 | fraction << 64
    return UUID(int=value | 0b10 << 62 | secrets.randbits(62))


def uuid7_derived(id: UUID, name: str) -> UUID:
    """Another UUID of the same millisecond, which follows from `id` and `name`."""
    hashed = uuid5(id, name).int
    fraction, rest = hashed >> 64 & 0xFFF, hashed & ((1 << 62) - 1)
    return UUID(int=id.int >> 80 << 80 | 7 << 76 | fraction << 64 | 0b10 << 62 | rest)
