"""Keyset pagination: a page begins after the last row of the one before, so that inserts shift nothing."""

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from sqlalchemy import Select, tuple_

KeyT = TypeVar("KeyT")
KeyT_co = TypeVar("KeyT_co", covariant=True)
SelectT = TypeVar("SelectT", bound=Select[Any])


class Slice(Protocol[KeyT_co]):
    """A part of a listing: up to `fetch` rows behind the one with the key `after`; None: from the first."""

    @property
    def after(self) -> KeyT_co | None: ...

    @property
    def fetch(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Part(Generic[KeyT]):
    """A slice that is no page of a request: `fetch` rows, behind the one with the key `after`."""

    fetch: int
    after: KeyT | None = None


def sliced(query: SelectT, part: Slice[Any], *columns: Any, newest_first: bool = False) -> SelectT:
    """Return the query of one part, sorted by `columns`, whose values together are the key of a row."""
    key = tuple_(*columns)
    if part.after is not None:
        after = part.after if isinstance(part.after, tuple) else (part.after,)
        query = query.where(key < after if newest_first else key > after)
    order = [column.desc() for column in columns] if newest_first else columns
    return query.order_by(*order).limit(part.fetch)
