"""The installation's default limits, for settings: without SQLAlchemy, which every command would import with them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

MAX_DEFAULT_TOKENS: Final = 1_000_000
UnknownParameters: TypeAlias = Literal["refuse", "report"]
"""What becomes of a request with a parameter that the server does not know: `report` leaves it out and names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultLimits:
    """The installation's defaults: the limits of a tenant whose own are null. `max_adapter_bytes` in bytes.

    `default_max_tokens` and, by tier, `tier_default_max_tokens`: the most tokens of a chat answer whose request names no
    maximum; 0 is what the context leaves. `unknown_parameters`: of tenants that have `default`.
    """

    max_adapters: int = 10_000
    max_adapter_bytes: int = 16 << 30
    max_keys: int = 10_000
    default_max_tokens: int = 4096
    tier_default_max_tokens: Mapping[str, int] = field(default_factory=dict)
    unknown_parameters: UnknownParameters = "refuse"

    def in_force(self, name: str, own: int | None) -> int:
        """The limit `name` of a tenant whose own limit is `own`."""
        default: int = getattr(self, name)
        return default if own is None else own

    def max_tokens(self, tier: str, own: int | None) -> int | None:
        """The default maximum of a tenant of that tier whose own is `own`; None is what the context leaves."""
        default = self.tier_default_max_tokens.get(tier, self.default_max_tokens)
        return (default if own is None else own) or None

    def reports_unknown(self, own: str) -> bool:
        """Whether a tenant that has `own` gets unknown parameters reported."""
        return (self.unknown_parameters if own == "default" else own) == "report"


STANDARD_LIMITS: Final = DefaultLimits()
"""Those of an installation that sets none."""
