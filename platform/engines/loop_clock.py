"""A clock of the time in which an event loop ran, to measure the silence of a peer.

Invariant: time in which the loop stood still is no silence of the peer, because no message could be received.
"""


class LoopClock:
    """`time` is in seconds. Call `tick` every `interval_s`: at most that much passes from tick to tick.

    After the loop stood still, a peer thus has the rest of its limit to reply to new pings.
    """

    def __init__(self, interval_s: float, now: float) -> None:
        self._interval_s = interval_s
        self._ticked_at = now
        self.time = 0.0

    def tick(self, now: float) -> None:
        """Advance to `now`, a reading of `time.monotonic`."""
        self.time += min(now - self._ticked_at, self._interval_s)
        self._ticked_at = now
