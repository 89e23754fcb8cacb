"""Authenticates callers: `Authorization: Bearer lpx_…` -> `Caller` or `OperatorCaller`, as a route dependency (RFC 6750).

Format and checksum are checked before any I/O. A database that is down is a 503, never a 401; on `/v1` a key that this gateway
has read recently goes on working then. Management routes look a key up for every request; where keys are cached, requests share
a look-up, and admission refuses a caller with an outdated policy (`renew`).
"""

import hmac
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Final, TypeAlias
from uuid import UUID

from starlette.requests import Request

from loraplex.platform.auth.client_address import ClientAddresses
from loraplex.platform.auth.failure_buckets import FailureBuckets
from loraplex.platform.auth.key_cache import KeyCache, Lookup
from loraplex.platform.auth.presented_keys import authorizations
from loraplex.platform.errors import (
    AddressNotAllowed,
    InsufficientScope,
    Overloaded,
    ShareExceeded,
    TooManyUnknownKeys,
)
from loraplex.platform.tenant_limiter import AT_ONCE, TenantLimiter
from loraplex.tenants.api_keys.key_format import ParsedKey, parse_key
from loraplex.tenants.api_keys.keys import AuthenticatedKey, KeyRepository, check_key, check_usable
from loraplex.tenants.api_keys.last_used import LastUsedTracker
from loraplex.tenants.api_keys.networks import client_network, is_within, parse_address, parse_network
from loraplex.tenants.database import Database
from loraplex.tenants.errors import (
    DatabaseUnavailable,
    ExpiredKey,
    MalformedKey,
    PolicyStale,
    RevokedKey,
    TenantSuspended,
    UnknownKey,
)
from loraplex.tenants.scopes import OPERATOR, effective_scopes
from loraplex.tenants.single_flight import SingleFlight

RequirePolicy: TypeAlias = Callable[[UUID, int], Awaitable[None]]
"""(tenant, policy epoch) -> None; raises `PolicyStale` if a newer policy of the tenant was published."""
UNKNOWN_AT_ONCE: Final = 2
"""Database connections that look up keys this gateway has never found."""
MAX_WAITING: Final = 1024
"""Look-ups of one tenant, or of one client network, that wait for a connection."""
PENALIZED_AT_ONCE: Final = 1
"""Further connections that look up such keys for networks which presented too many that do not exist."""
PENALIZED_WAITING: Final = 16
"""Look-ups of one such network that wait; further ones are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """An authenticated tenant key. `scopes` include those they imply; `weight` is the tenant's share relative to other tenants.

    `policy_epoch`: the version of the tenant's policy at the look-up. `address`: the client's, None when unknown.
    """

    tenant_id: UUID
    tenant_name: str
    api_key_id: UUID
    key_id: str
    scopes: frozenset[str]
    weight: float
    tier: str
    policy_epoch: int
    address: str | None
    key: AuthenticatedKey = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCaller:
    """An authenticated operator key."""

    api_key_id: UUID
    key_id: str
    address: str | None


class Authenticator:
    """Looks keys up. With `cached`, each key at most once per `cache_s` seconds; unknown ids never more often.

    Requests that need the same key at once share its look-up there. Keys that were never found share a part of the
    connections, so that forged ones delay no other.

    With `known`, a key whose look-up fails because PostgreSQL is away is served stale: as it was cached at most `known_s`
    seconds ago, if no newer policy of its tenant was published. Admission checks the latter for `cached` callers, and
    `require_policy` for others. A look-up that hangs delays such a caller by half a second at most, and by nothing once
    the database's circuit breaker is open.
    """

    def __init__(
        self,
        database: Database,
        cache_s: float,
        *,
        known_s: float = 0.0,
        require_policy: RequirePolicy | None = None,
        addresses: ClientAddresses | None = None,
        key_use: LastUsedTracker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._addresses = addresses or ClientAddresses()
        self._key_use = key_use or LastUsedTracker()
        self._require_policy = require_policy
        self._cache = KeyCache(cache_s, clock, known_s)
        self._failures = FailureBuckets(clock)
        self._again = TenantLimiter("key look-ups", per_tenant=AT_ONCE, waiting=MAX_WAITING)
        self._unknown = TenantLimiter(
            "key look-ups", owner="address", total=UNKNOWN_AT_ONCE, waiting=MAX_WAITING
        )
        self._penalized = TenantLimiter(
            "key look-ups", owner="address", total=PENALIZED_AT_ONCE, waiting=PENALIZED_WAITING
        )
        self._shared = SingleFlight[AuthenticatedKey | None]()

    async def authorize(
        self,
        request: Request,
        scope: str | None = None,
        *,
        cached: bool = False,
        known: bool = False,
        either: bool = False,
    ) -> Caller:
        """Accept a tenant's key with `scope`; with None any key of a tenant. `either`: `x-api-key` may have it, too.

        It writes the tenant into the request's state, without which no JSON body is read; `authorize_operator` writes None. Both
        write the public id of the key.
        Both write begin and end of the authentication, on the monotonic clock, as `auth_span`.
        """
        address = self._addresses.of(request)
        with _Timed(request):
            headers = authorizations(request.headers) if either else request.headers.getlist("authorization")
            try:
                caller = await self.authenticate(headers, address, cached=cached, known=known)
            except (RevokedKey, ExpiredKey, TenantSuspended, AddressNotAllowed):
                # The key was genuine, so that its tenant may see the refusal.
                found = self._cache.last_found(parse_key(bearer_token(headers)).key_id)
                if found is not None:
                    request.state.refused_key = found.tenant_id, found.key_id, None
                raise
        request.state.tenant_id, request.state.key_id = caller.tenant_id, caller.key_id
        request.state.api_key_id = caller.api_key_id
        return check_scope(caller, scope)

    async def authorize_operator(self, request: Request) -> OperatorCaller:
        """Accept an operator's key."""
        headers, address = request.headers.getlist("authorization"), self._addresses.of(request)
        with _Timed(request):
            caller = operator_caller(await self._authentic(headers, address, cached=False), address)
        request.state.tenant_id, request.state.key_id = None, caller.key_id
        return caller

    async def authenticate(
        self, headers: list[str], address: str | None = None, *, cached: bool = False, known: bool = False
    ) -> Caller:
        """Authenticate a tenant's key.

        Raises `InvalidApiKey`, `TooManyUnknownKeys`, `TenantSuspended`, `AddressNotAllowed`, `Overloaded`,
        `StoreUnavailable`, or `InsufficientScope` for an operator's key.
        """
        return tenant_caller(await self._authentic(headers, address, cached=cached, known=known), address)

    async def renew(self, caller: Caller, scope: str | None = None) -> Caller:
        """Authenticate the caller again without the cache and forget the cached keys of its tenant: its policy is outdated.

        Callers with one key and one outdated policy share a look-up, which begins after the change; what was cached since is
        kept. Raises what `authenticate` does, and `InsufficientScope` when `scope` was taken from the key. While PostgreSQL
        is away no key of the tenant is known from then on, because its new policy cannot be read.
        """
        self._cache.forget(caller.tenant_id, caller.policy_epoch)
        outdated = (caller.tenant_id, caller.key_id, caller.policy_epoch)
        found = await self._shared.run(outdated, partial(self._look_up_again, caller))
        return _confirmed(found, caller, scope)

    async def confirm(self, caller: Caller, scope: str | None = None) -> Caller:
        """Authenticate the caller again without the cache, when nothing indicates a change. Raises as `renew`.

        While PostgreSQL is away a known caller is confirmed if no newer policy of its tenant was published.
        """
        has_fallback = self._cache.known(caller.key_id) is not None
        try:
            found = await self._look_up_again(caller, has_fallback=has_fallback)
        except DatabaseUnavailable as away:
            found = await self._known_key(caller.key_id, away, admitted=False)
        return _confirmed(found, caller, scope)

    async def caller_of(self, key_id: str, address: str | None, scope: str) -> Caller:
        """Return the caller of a key that was presented from `address` earlier, as it is now. Raises as `renew`."""
        return _usable(await self._look_up(key_id), address, scope)

    def forget(self, tenant_id: UUID) -> None:
        """Let the tenant's keys in the cache expire."""
        self._cache.forget(tenant_id)

    async def _authentic(
        self, headers: list[str], address: str | None, *, cached: bool, known: bool = False
    ) -> AuthenticatedKey:
        presented = parse_key(bearer_token(headers))
        now = datetime.now(UTC)
        found = check_key(await self._find(presented, address, cached=cached, known=known), presented, now)
        check_address(found, address)
        self._key_use.note(found.api_key_id, now)
        return found

    async def _find(
        self, presented: ParsedKey, address: str | None, *, cached: bool, known: bool
    ) -> AuthenticatedKey | None:
        last = self._cache.last_found(presented.key_id)
        # The secret of an id never changes, so a wrong one needs no look-up.
        if last is not None and not presented.matches(last.secret_sha256):
            return None
        lookup = self._cached(presented.key_id, cached=cached)
        if lookup is not None:
            return lookup.found
        # Networks share no look-up of an unknown key: one whose look-ups wait would delay the others.
        owner = client_network(address) if last is None else last.tenant_id
        if last is None:
            look_up = partial(self._find_unknown, presented, owner, cached=cached)
        else:
            has_fallback = known and self._cache.known(presented.key_id) is not None
            look_up = partial(self._find_again, presented, owner, cached=cached, has_fallback=has_fallback)
        try:
            return await (self._shared.run((owner, presented.key_id), look_up) if cached else look_up())
        except DatabaseUnavailable as away:
            if not known:
                raise
            return await self._known_key(presented.key_id, away, admitted=cached)

    async def _known_key(
        self, key_id: str, away: DatabaseUnavailable, *, admitted: bool
    ) -> AuthenticatedKey | None:
        """Return a known key as it was read. Raises `away` for another one.

        Unless the key is `admitted`, one with an outdated policy is looked up once more, without a fallback: PostgreSQL may
        only have been slow.
        """
        found = self._cache.known(key_id)
        if found is None:
            raise away
        tenant_id, policy_epoch = found.tenant_id, found.policy_epoch
        if admitted or self._require_policy is None or tenant_id is None or policy_epoch is None:
            return found
        try:
            await self._require_policy(tenant_id, policy_epoch)
        except PolicyStale:
            self._cache.forget(tenant_id, policy_epoch)
        else:
            return found
        async with self._again.slot(tenant_id):
            return await self._look_up(key_id)

    def _cached(self, key_id: str, *, cached: bool) -> Lookup | None:
        """Return a valid look-up; where the caller is not `cached`, only one that found no key."""
        lookup = self._cache.get(key_id)
        return lookup if cached or (lookup is not None and lookup.found is None) else None

    async def _find_again(
        self, presented: ParsedKey, tenant_id: Hashable, *, cached: bool, has_fallback: bool
    ) -> AuthenticatedKey | None:
        """Look up a key that this gateway has found before."""
        async with self._again.slot(tenant_id):
            lookup = self._cached(presented.key_id, cached=cached)
            if lookup is not None:
                return lookup.found
            return await self._look_up(presented.key_id, has_fallback=has_fallback)

    async def _find_unknown(
        self, presented: ParsedKey, network: Hashable, *, cached: bool
    ) -> AuthenticatedKey | None:
        """Look up a key that this gateway has never found. Raises `TooManyUnknownKeys`, `Overloaded`."""
        async with self._unknown.slot(network):
            lookup = self._cached(presented.key_id, cached=cached)
            if lookup is not None:
                return lookup.found
            if self._failures.take(network):
                # Given back unless the key turns out to be a failure.
                failed = False
                try:
                    found = await self._look_up(presented.key_id)
                    failed = found is None or not presented.matches(found.secret_sha256)
                finally:
                    if not failed:
                        self._failures.give_back(network)
                return found
        return await self._find_penalized(presented, network)

    async def _find_penalized(self, presented: ParsedKey, network: Hashable) -> AuthenticatedKey | None:
        """Look up a key of a network without failures left: a valid key may share its address with forged ones."""
        try:
            async with self._penalized.slot(network):
                return await self._look_up(presented.key_id)
        except (Overloaded, ShareExceeded):
            message = "This address presented too many API keys that do not exist; try again."
            raise TooManyUnknownKeys(message) from None

    async def _look_up_again(self, caller: Caller, *, has_fallback: bool = False) -> AuthenticatedKey | None:
        async with self._again.slot(caller.tenant_id):
            return await self._look_up(caller.key_id, has_fallback=has_fallback)

    async def _look_up(self, key_id: str, *, has_fallback: bool = False) -> AuthenticatedKey | None:
        until = self._cache.deadline()
        found = await self._database.bounded(partial(self._read, key_id), has_fallback=has_fallback)
        self._cache.put(key_id, Lookup(found, until))
        return found

    async def _read(self, key_id: str) -> AuthenticatedKey | None:
        async with self._database.as_writer() as session:
            return await KeyRepository(session).find(key_id)


class _Timed:
    """A context that writes when its block began and ended into the state of `request`, however it ends."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._request.state.auth_span = (self._began, time.monotonic())


def bearer_token(headers: list[str]) -> str:
    """Return the token of the only `Authorization` header. Raises `MalformedKey`."""
    if len(headers) != 1:
        raise MalformedKey("exactly one Authorization header is needed")
    scheme, _, token = headers[0].partition(" ")
    if scheme.lower() != "bearer":
        raise MalformedKey("the Authorization scheme is not Bearer")
    return token.strip(" ")


def check_address(found: AuthenticatedKey, address: str | None) -> AuthenticatedKey:
    """Check the address against the key's networks; a key without networks allows all. Raises `AddressNotAllowed`."""
    networks = [parse_network(text) for text in found.allowed_cidrs]
    if networks and not is_within(None if address is None else parse_address(address), networks):
        raise AddressNotAllowed("This key may not be used from this address.")
    return found


def _confirmed(found: AuthenticatedKey | None, caller: Caller, scope: str | None) -> Caller:
    """Check what was found for the key of `caller` now."""
    if found is None or not hmac.compare_digest(found.secret_sha256, caller.key.secret_sha256):
        raise UnknownKey("no such API key")
    return _usable(found, caller.address, scope)


def _usable(found: AuthenticatedKey | None, address: str | None, scope: str | None) -> Caller:
    """Check what was found for a key that is used from `address` now."""
    if found is None:
        raise UnknownKey("no such API key")
    found = check_usable(found, datetime.now(UTC))
    return check_scope(tenant_caller(check_address(found, address), address), scope)


def check_scope(caller: Caller, scope: str | None) -> Caller:
    if scope is not None and scope not in caller.scopes:
        raise InsufficientScope(f"This needs a key with the scope `{scope}`.")
    return caller


def tenant_caller(found: AuthenticatedKey, address: str | None) -> Caller:
    """Build the caller of a tenant's key. Raises `InsufficientScope` for an operator's key."""
    tenant_id, name, epoch = found.tenant_id, found.tenant_name, found.policy_epoch
    if tenant_id is None or name is None or epoch is None or found.weight is None or found.tier is None:
        raise InsufficientScope("An operator's key cannot act for a tenant.")
    return Caller(
        tenant_id=tenant_id,
        tenant_name=name,
        api_key_id=found.api_key_id,
        key_id=found.key_id,
        scopes=effective_scopes(found.scopes),
        weight=found.weight,
        tier=found.tier,
        policy_epoch=epoch,
        address=address,
        key=found,
    )


def operator_caller(found: AuthenticatedKey, address: str | None) -> OperatorCaller:
    """Build the caller of an operator's key. Raises `InsufficientScope` for a tenant's key."""
    if found.tenant_id is not None or OPERATOR not in found.scopes:
        raise InsufficientScope("This needs an operator's key.")
    return OperatorCaller(api_key_id=found.api_key_id, key_id=found.key_id, address=address)
