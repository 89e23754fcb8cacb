"""A document of the identity provider, such as its discovery (OpenID Connect Discovery 1.0) or its keys (RFC 7517).

Invariant: of one document at most one fetch is in progress, and after a failed one none begins for `FAILURE_S`, whatever
clients without credentials ask for.
"""

import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from loraplex.tenants.errors import SignInRefused
from loraplex.tenants.single_flight import SingleFlight

Document = dict[str, Any]

LIFETIME_S: Final = 3600.0
RENEWAL_S: Final = 60.0
"""How old a document must be before a provider that changed it is asked again."""
FAILURE_S: Final = 5.0


class ProviderDocument:
    """Kept for `LIFETIME_S`; where the provider is away, it is served stale. `fetch` raises `SignInRefused`."""

    def __init__(
        self,
        fetch: Callable[[], Coroutine[Any, Any, Document]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fetch = fetch
        self._clock = clock
        self._flights = SingleFlight[Document](cancels=False)
        self._found: Document | None = None
        self._fetched_at = 0.0
        self._failure: SignInRefused | None = None
        self._failed_at = 0.0

    async def current(self) -> Document:
        """Return the document. Raises `SignInRefused` where it was never fetched and cannot be."""
        return await self._younger_than(LIFETIME_S)

    async def renewed(self) -> Document:
        """Return the document as the provider has it now, or had it `RENEWAL_S` ago at most. Raises as `current`."""
        return await self._younger_than(RENEWAL_S)

    async def _younger_than(self, seconds: float) -> Document:
        now = self._clock()
        if self._found is not None and now - self._fetched_at < seconds:
            return self._found
        if self._failure is None or now - self._failed_at >= FAILURE_S:
            return await self._flights.run(None, self._refresh)
        return self._found_or(self._failure)

    async def _refresh(self) -> Document:
        try:
            self._found, self._failure = await self._fetch(), None
        except SignInRefused as error:
            self._failure, self._failed_at = error, self._clock()
            return self._found_or(error)
        self._fetched_at = self._clock()
        return self._found

    def _found_or(self, error: SignInRefused) -> Document:
        if self._found is None:
            raise error
        return self._found
