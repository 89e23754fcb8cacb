"""One call of the inference plane: who calls, and what its answer says whatever becomes of it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from loraplex.platform.auth.authenticator import Caller


@dataclass(slots=True, kw_only=True)
class InferenceCall:
    """`request_id` is the id on the answer. `headers` go out with the answer, also with one that tells of an error.

    `renewed` and `confirmed` authenticate a caller once more, without any cache, and raise what a first authentication does;
    `renewed` also has what is cached of its tenant forgotten.
    """

    caller: Caller
    request_id: str
    renewed: Callable[[Caller], Awaitable[Caller]]
    confirmed: Callable[[Caller], Awaitable[Caller]]
    headers: dict[str, str] = field(default_factory=dict)

    async def renew(self) -> None:
        """From here on `caller` is what its key says now. Whoever is none any more is told nothing but that."""
        self.caller = await self._asked(self.renewed)

    async def confirm(self) -> None:
        """As `renew`, where nothing says that anything has changed."""
        self.caller = await self._asked(self.confirmed)

    async def _asked(self, ask: Callable[[Caller], Awaitable[Caller]]) -> Caller:
        try:
            return await ask(self.caller)
        except Exception:
            self.headers.clear()
            raise
