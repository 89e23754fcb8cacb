"""One call of the inference plane: who calls, and what its answer says whatever becomes of it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from loraplex.platform.auth import Caller


@dataclass(slots=True, kw_only=True)
class InferenceCall:
    """`request_id` is the id on the answer. `headers` go out with the answer, also with one that tells of an error.

    `renewed` authenticates a caller once more, without any cache; it raises what a first authentication does.
    """

    caller: Caller
    request_id: str
    renewed: Callable[[Caller], Awaitable[Caller]]
    headers: dict[str, str] = field(default_factory=dict)

    async def renew(self) -> None:
        """From here on `caller` is what its key says now."""
        self.caller = await self.renewed(self.caller)
