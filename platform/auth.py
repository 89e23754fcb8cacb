"""Who is calling: `Authorization: Bearer lpx_…` -> `Caller`, as a dependency of each route (RFC 6750).

Format and checksum are judged before any I/O. A database that is down is a 503, never a 401. A revoked key or a
suspended tenant stops working within the cache's time.
"""

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

from starlette.requests import Request

from loraplex.platform.errors import InsufficientScope
from loraplex.tenants.database import Database
from loraplex.tenants.errors import MalformedKey
from loraplex.tenants.key_format import ParsedKey, parse_key
from loraplex.tenants.keys import FoundKey, KeyRepository, check_key
from loraplex.tenants.scopes import effective_scopes

MAX_CACHED_KEYS = 10_000


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated tenant key. `weight` is the tenant's fair share relative to others."""

    tenant_id: UUID
    tenant_name: str
    api_key_id: UUID
    key_id: str
    scopes: frozenset[str]
    weight: float
    address: str | None = None


@dataclass(frozen=True, slots=True)
class OperatorCaller:
    """An authenticated operator's key."""

    api_key_id: UUID
    key_id: str
    address: str | None = None


class Authenticator:
    """Looks keys up, at most once per `cache_s` seconds each; unknown ids are remembered as well."""

    def __init__(
        self, database: Database, cache_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._database = database
        self._cache_s = cache_s
        self._clock = clock
        self._records: OrderedDict[str, tuple[float, FoundKey | None]] = OrderedDict()

    def requires(self, scope: str) -> Callable[[Request], Awaitable[Caller]]:
        """A dependency that lets a tenant's key with `scope` through."""

        async def authorized(request: Request) -> Caller:
            caller = await self.authenticate(request.headers.getlist("authorization"))
            if scope not in caller.scopes:
                raise InsufficientScope(f"This needs a key with the scope `{scope}`.")
            return caller

        return authorized

    async def authenticate(self, headers: list[str]) -> Caller:
        """Raises `InvalidApiKey`, `TenantSuspended`, `InsufficientScope` for an operator's key, `DatabaseUnavailable`."""
        presented = parse_key(bearer_token(headers))
        record = check_key(await self._find(presented), presented, datetime.now(UTC))
        if record.tenant_id is None or record.tenant_name is None or record.weight is None:
            raise InsufficientScope("An operator's key cannot act for a tenant.")
        return Caller(
            tenant_id=record.tenant_id,
            tenant_name=record.tenant_name,
            api_key_id=record.api_key_id,
            key_id=record.key_id,
            scopes=effective_scopes(record.scopes),
            weight=record.weight,
        )

    async def _find(self, presented: ParsedKey) -> FoundKey | None:
        known = self._records.get(presented.key_id)
        if known is not None and self._clock() < known[0]:
            return known[1]
        # The age counts from before the query: what the query saw may be older than its end.
        until = self._clock() + self._cache_s
        async with self._database.as_writer() as session:
            record = await KeyRepository(session).find(presented.key_id)
        self._records[presented.key_id] = (until, record)
        self._records.move_to_end(presented.key_id)
        if len(self._records) > MAX_CACHED_KEYS:
            self._records.popitem(last=False)
        return record


def bearer_token(headers: list[str]) -> str:
    """The token of the one `Authorization` header. Raises `MalformedKey`."""
    if len(headers) != 1:
        raise MalformedKey("exactly one Authorization header is needed")
    scheme, _, token = headers[0].partition(" ")
    if scheme.lower() != "bearer":
        raise MalformedKey("the Authorization scheme is not Bearer")
    return token.strip(" ")
