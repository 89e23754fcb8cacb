"""The installation's default limits, for settings: without SQLAlchemy, which every command would import with them."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultLimits:
    """The installation's defaults: the limits of a tenant whose own are null. `max_adapter_bytes` in bytes."""

    max_adapters: int = 10_000
    max_adapter_bytes: int = 16 << 30
    max_keys: int = 10_000

    def in_force(self, name: str, own: int | None) -> int:
        """The limit `name` of a tenant whose own limit is `own`."""
        default: int = getattr(self, name)
        return default if own is None else own


STANDARD_LIMITS: Final = DefaultLimits()
"""Those of an installation that sets none."""
