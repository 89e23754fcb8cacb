"""By which model names requests ask for adapters, so that metrics can name an adapter as a router's requests do.

Invariant: only names that were resolved are kept, so all of them are registered; the number of names is bounded.
"""

from collections import OrderedDict
from typing import Final

MAX_ADAPTERS: Final = 4096
NAMES_PER_ADAPTER: Final = 4


class AdapterNames:
    """The newest names of the adapters that requests used last. `of` may be called from another thread."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    def record(self, digest: str, name: str) -> None:
        """Remember that a request asked for an adapter by this model name."""
        others = [each for each in self._names.get(digest, ()) if each != name]
        self._names[digest] = (name, *others[: NAMES_PER_ADAPTER - 1])
        self._names.move_to_end(digest)
        if len(self._names) > MAX_ADAPTERS:
            self._names.popitem(last=False)

    def of(self, digest: str) -> tuple[str, ...]:
        """The names of an adapter, newest first; its digest where no request has named it."""
        return self._names.get(digest, (digest,))
