"""`QuarantineTracker`: counts non-finite rows per adapter; repeated ones quarantine it."""

from collections import OrderedDict
from itertools import islice

from loraplex.engine.messages import AdapterKey

MAX_FAULTY = 4096
"""Adapters remembered; above this number the ones reported longest ago are forgotten."""


class QuarantineTracker:
    """Quarantines an adapter from `quarantine_after` rows on."""

    def __init__(self, quarantine_after: int, max_faulty: int = MAX_FAULTY) -> None:
        self._quarantine_after = quarantine_after
        self._max_faulty = max_faulty
        self._rows: OrderedDict[AdapterKey, int] = OrderedDict()

    def report(self, key: AdapterKey) -> None:
        """Count one more row."""
        self._rows[key] = self.count(key) + 1
        self._rows.move_to_end(key)
        if len(self._rows) > self._max_faulty:
            self._rows.popitem(last=False)

    def count(self, key: AdapterKey) -> int:
        return self._rows.get(key, 0)

    def quarantined(self, most: int) -> list[AdapterKey]:
        """Quarantined adapters by their last faulty row, newest first. O(remembered); a healthy system has none."""
        return list(islice((key for key in reversed(self._rows) if self.is_quarantined(key)), most))

    def is_quarantined(self, key: AdapterKey) -> bool:
        return key in self._rows and self._rows[key] >= self._quarantine_after
