"""Sort orders of listings, and how a cursor stores a row's position in one. Invariant: `read` undoes `write`."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Generic, TypeVar
from uuid import UUID

Position = tuple[str | int, ...]
"""The sort key of the last row of a page, as a cursor stores it."""
RowT = TypeVar("RowT")
KeyT = TypeVar("KeyT")


@dataclass(frozen=True, slots=True)
class SortOrder(Generic[RowT, KeyT]):
    """`key`: the sort key of a row; no other row of the listing has the same."""

    key: Callable[[RowT], KeyT]
    write: Callable[[KeyT], Position]
    read: Callable[[Position], KeyT]


def by_text(key: Callable[[RowT], str]) -> SortOrder[RowT, str]:
    return SortOrder(key, lambda text: (text,), lambda position: str(position[0]))


def by_number(key: Callable[[RowT], int]) -> SortOrder[RowT, int]:
    return SortOrder(key, lambda number: (number,), lambda position: int(position[0]))


def by_id(key: Callable[[RowT], UUID]) -> SortOrder[RowT, UUID]:
    return SortOrder(key, lambda identity: (str(identity),), lambda position: UUID(str(position[0])))


def by_time(key: Callable[[RowT], tuple[datetime, UUID]]) -> SortOrder[RowT, tuple[datetime, UUID]]:
    """Sort by time, then by id for rows of the same time."""
    return SortOrder(
        key,
        lambda moment: (moment[0].astimezone(UTC).isoformat(), str(moment[1])),
        lambda position: (datetime.fromisoformat(str(position[0])), UUID(str(position[1]))),
    )


BY_CREATION: Final[SortOrder[Any, tuple[datetime, UUID]]] = by_time(lambda row: (row.created_at, row.id))
BY_ID: Final[SortOrder[Any, UUID]] = by_id(lambda row: row.id)
"""Sort by ids that contain a time."""
