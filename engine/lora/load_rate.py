"""`LoadRate`: bytes per second as measured, for the price of a load."""

SMOOTHING = 0.2
"""Weight of the newest load: one slow disk read in five changes the price, one in fifty hardly."""


class LoadRate:
    """An exponential mean of seconds per byte, weighted by bytes: small adapters say little of a rate."""

    def __init__(self, bytes_per_second: float) -> None:
        """What is taken for true until a load is measured."""
        self._bytes = bytes_per_second
        self._seconds = 1.0
        self._measured = False

    @property
    def bytes_per_second(self) -> float:
        return self._bytes / self._seconds

    def note(self, nbytes: int, seconds: float) -> None:
        """A load of `nbytes` took `seconds`."""
        if nbytes <= 0 or seconds < 0:
            return
        weight = SMOOTHING if self._measured else 1.0
        self._bytes += weight * (nbytes - self._bytes)
        self._seconds += weight * (max(seconds, 1e-9) - self._seconds)
        self._measured = True

    def seconds(self, nbytes: float) -> float:
        """What a load of `nbytes` takes."""
        return nbytes / self.bytes_per_second
