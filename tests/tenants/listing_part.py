"""A part of a listing, as a page or a route asks for one."""

from dataclasses import dataclass
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT")


@dataclass(frozen=True)
class Part(Generic[KeyT]):
    """Up to `fetch` rows behind the one with the key `after`; None: from the first."""

    after: KeyT | None
    fetch: int
