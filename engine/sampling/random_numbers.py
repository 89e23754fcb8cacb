"""Counter-based uniform numbers for sampling, after Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".

Invariant: a number is a pure function of (seed, choice, position). No generator has state, so a row draws the
same number alone, in any batch, in any slot and after a preemption.
"""

import hashlib

_MANTISSA_BITS = 53


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits. `position` counts the output tokens before the one to draw."""
    digest = hashlib.blake2b(b"%d:%d:%d" % (seed, choice, position), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> (64 - _MANTISSA_BITS)) * 2.0**-_MANTISSA_BITS
