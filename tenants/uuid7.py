"""UUIDs that sort by the time they were made: version 7 (RFC 9562), with a fraction of the millisecond in `rand_a`."""

import secrets
import time
from typing import Final
from uuid import UUID

_MILLISECOND: Final = 1_000_000


def uuid7() -> UUID:
    """A new one. Of two of one process the later is greater when a quarter of a microsecond lies between them."""
    milliseconds, nanoseconds = divmod(time.time_ns(), _MILLISECOND)
    fraction = (nanoseconds << 12) // _MILLISECOND
    value = (milliseconds & ((1 << 48) - 1)) << 80 | 7 << 76 | fraction << 64
    return UUID(int=value | 0b10 << 62 | secrets.randbits(62))
