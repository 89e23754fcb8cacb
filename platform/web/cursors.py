"""Keyset pagination: a page begins after the last row of the previous one, so that inserts shift nothing.

A cursor is opaque and signed. It carries the position and the filters of its listing, and is valid for that listing and
caller only. It is no secret: row-level security applies to every caller that presents one.
"""

import base64
import binascii
import hmac
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NoReturn, TypeVar

from starlette.requests import Request

from loraplex.platform.errors import InvalidParameter, UnknownParameter
from loraplex.platform.web.responses import ResponseModel
from loraplex.platform.web.sorting import KeyT, Position, RowT, SortOrder

CURSOR_DOMAIN: Final = b"loraplex/cursor/v1"
"""The purpose of the key that signs cursors."""
MAX_LIMIT: Final = 100
DEFAULT_LIMIT: Final = 20
MAX_FILTER_LENGTH: Final = 200
MAX_CURSOR_LENGTH: Final = 4096
_MAC_BYTES: Final = 16
_LIMIT: Final = re.compile(r"[1-9][0-9]{0,2}")
_BASE64: Final = re.compile(r"[A-Za-z0-9_-]+")

ItemT = TypeVar("ItemT")


class Listing(ResponseModel, Generic[ItemT]):
    """`next_cursor` is null on the last page."""

    data: list[ItemT]
    next_cursor: str | None


@dataclass(frozen=True, slots=True)
class Cursors:
    """Signs positions with `key`, for one `scope`: a listing as one caller sees it."""

    key: bytes
    scope: bytes

    def encode(self, filters: Mapping[str, str], position: Position) -> str:
        content = json.dumps([filters, position], separators=(",", ":"), sort_keys=True).encode()
        return base64.urlsafe_b64encode(self._mac(content) + content).rstrip(b"=").decode()

    def decode(self, cursor: str) -> tuple[dict[str, str], Position]:
        """Verify and decode a cursor. Raises `InvalidParameter` for one that `encode` did not make."""
        if len(cursor) > MAX_CURSOR_LENGTH or not _BASE64.fullmatch(cursor):
            _refuse()
        try:
            signed = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        except binascii.Error:
            _refuse()
        mac, content = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(content)):
            _refuse()
        filters, position = json.loads(content)
        return filters, tuple(position)

    def _mac(self, content: bytes) -> bytes:
        message = len(self.scope).to_bytes(8, "big") + self.scope + content
        return hmac.digest(self.key, message, "sha256")[:_MAC_BYTES]


@dataclass(frozen=True, slots=True)
class Page(Generic[RowT, KeyT]):
    """The requested page: at most `limit` rows that match `filters` and follow the row with the key `after`."""

    limit: int
    after: KeyT | None
    filters: Mapping[str, str]
    cursors: Cursors
    order: SortOrder[RowT, KeyT]

    @property
    def fetch(self) -> int:
        """How many rows to read: one more than the page has, to know whether there is a next page."""
        return self.limit + 1

    def listing(self, rows: Sequence[Any]) -> Listing[Any]:
        """Build the response of records that were read with `fetch`."""
        return Listing(data=[*self.cut(rows)], next_cursor=self.next(rows))

    def cut(self, rows: Sequence[ItemT]) -> Sequence[ItemT]:
        """Return the rows of this page."""
        return rows[: self.limit]

    def next(self, rows: Sequence[Any]) -> str | None:
        """Return the cursor of the next page; None on the last."""
        return self.cursor(self.order.key(rows[self.limit - 1])) if len(rows) > self.limit else None

    def cursor(self, key: KeyT) -> str:
        """Return the cursor of the page that follows the row with this key."""
        return self.cursors.encode(self.filters, self.order.write(key))


def page_from(
    request: Request, cursors: Cursors, order: SortOrder[RowT, KeyT], parameter: str, limit: int
) -> Page[RowT, KeyT]:
    """Read the place of a page of the console, which its address has as `parameter`. Raises `InvalidParameter`."""
    given = request.query_params.get(parameter)
    if not given:
        return Page(limit, None, {}, cursors, order)
    try:
        _, position = cursors.decode(given)
        return Page(limit, order.read(position), {}, cursors, order)
    except (InvalidParameter, ValueError, IndexError):
        message = "There is no such page: begin with the first one."
        raise InvalidParameter(message, param=parameter) from None


def page_of(
    request: Request, cursors: Cursors, order: SortOrder[RowT, KeyT], filters: Iterable[str] = ()
) -> Page[RowT, KeyT]:
    """Parse the query of a listing. Raises `UnknownParameter`, `InvalidParameter`.

    `filters` are the names of query parameters that select rows. A cursor carries its filters: those given next to it must
    be the same.
    """
    given = read_query(request, ("cursor", "limit", *filters))
    limit = _limit(given.pop("limit", None))
    cursor = given.pop("cursor", None)
    if cursor is None:
        return Page(limit, None, given, cursors, order)
    own_filters, position = cursors.decode(cursor)
    for name, value in given.items():
        if own_filters.get(name) != value:
            raise InvalidParameter(f"`{name}` differs from that of the cursor's listing.", param=name)
    try:
        after = order.read(position)
    except (ValueError, IndexError):
        # An earlier release signed it, whose listing was sorted by something else.
        _refuse()
    return Page(limit, after, own_filters, cursors, order)


def page_parameters(filters: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Build the query parameters of a listing for `openapi_extra`. `filters`: name -> meaning."""
    limit = {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT}
    rows: list[tuple[str, str, dict[str, Any]]] = [
        ("cursor", "`next_cursor` of the previous page.", {"type": "string", "maxLength": MAX_CURSOR_LENGTH}),
        ("limit", "Largest number of rows of the page.", limit),
    ]
    for name, meaning in (filters or {}).items():
        rows.append((name, meaning, {"type": "string", "minLength": 1, "maxLength": MAX_FILTER_LENGTH}))
    return [query_parameter(*row) for row in rows]


def flag(request: Request, name: str) -> bool:
    """Read the only query parameter of a route: `true`, or `false` as without it. Raises as `page_of`."""
    value = read_query(request, (name,)).get(name, "false")
    if value not in ("true", "false"):
        raise InvalidParameter(f"`{name}` must be `true` or `false`.", param=name)
    return value == "true"


def flag_parameter(name: str, meaning: str) -> dict[str, Any]:
    """Build the `openapi_extra` of a route with such a parameter."""
    schema = {"type": "boolean", "default": False}
    return {"parameters": [query_parameter(name, meaning, schema)]}


def query_parameter(
    name: str, meaning: str, schema: Mapping[str, Any], *, required: bool = False
) -> dict[str, Any]:
    """Build the document of a query parameter."""
    return {"in": "query", "name": name, "required": required, "description": meaning, "schema": schema}


def read_query(request: Request, known: Collection[str]) -> dict[str, str]:
    """Read the query parameters that a route knows, each given once at most. Raises `UnknownParameter`, `InvalidParameter`."""
    given: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in known:
            raise UnknownParameter(
                f"Unknown query parameter `{name[:64]}`; allowed: {', '.join(known)}.", param=name[:64]
            )
        if name in given:
            raise InvalidParameter(f"`{name}` is given twice.", param=name)
        if name not in ("cursor", "limit") and not _is_filter(value):
            raise InvalidParameter(
                f"`{name}` must be 1 to {MAX_FILTER_LENGTH} printable characters.", param=name
            )
        given[name] = value
    return given


def _is_filter(value: str) -> bool:
    return 1 <= len(value) <= MAX_FILTER_LENGTH and value.isprintable()


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    if not _LIMIT.fullmatch(text) or int(text) > MAX_LIMIT:
        raise InvalidParameter(f"`limit` must be a whole number from 1 to {MAX_LIMIT}.", param="limit")
    return int(text)


def _refuse() -> NoReturn:
    raise InvalidParameter("`cursor` is not a `next_cursor` of this listing.", param="cursor")
