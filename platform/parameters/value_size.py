"""The size of a JSON value, counted no further than it matters."""

from collections.abc import Mapping, Sequence


def size_of(value: object, most: int) -> int:
    """Characters of all strings and names, and one for every value. Counting ends above `most`."""
    size, left = 0, [value]
    while left and size <= most:
        inner = left.pop()
        size += 1
        if isinstance(inner, str):
            size += len(inner)
        elif isinstance(inner, Mapping | Sequence) and size + len(inner) > most:
            # Each counts one at least: not even a list of them is made.
            return size + len(inner)
        elif isinstance(inner, Mapping):
            size += sum(map(len, inner))
            left.extend(inner.values())
        elif isinstance(inner, Sequence):
            left.extend(inner)
    return size
