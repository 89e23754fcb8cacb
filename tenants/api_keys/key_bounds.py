"""From where and until when a key works, and which of two keys reaches further. Invariant: what one key grants to another by
creating, rotating or changing it lies within its own bounds; a change that only narrows grants nothing.
"""

from dataclasses import dataclass
from datetime import datetime

from loraplex.tenants.api_keys.keys import KeyChange, check_expiry
from loraplex.tenants.api_keys.networks import are_covered, check_networks
from loraplex.tenants.errors import BoundNotHeld
from loraplex.tenants.models import ApiKey


@dataclass(frozen=True, slots=True)
class KeyBounds:
    """`networks` () is from everywhere, `expires_at` None is for ever."""

    networks: tuple[str, ...]
    expires_at: datetime | None

    @classmethod
    def of(cls, record: ApiKey) -> "KeyBounds":
        return cls(tuple(record.allowed_cidrs), record.expires_at)

    def changed(self, change: KeyChange) -> "KeyBounds":
        """What `change` would make of them. Raises `InvalidField`."""
        networks, expires_at = self.networks, self.expires_at
        if "allowed_cidrs" in change:
            networks = tuple(check_networks("allowed_cidrs", change["allowed_cidrs"]))
        if "expires_at" in change and change["expires_at"] != expires_at:
            expires_at = check_expiry(change["expires_at"])
        return KeyBounds(networks, expires_at)

    def exceeded_by(self, other: "KeyBounds") -> str | None:
        """The field in which `other` reaches further, if any."""
        if self.networks and not (other.networks and are_covered(other.networks, self.networks)):
            return "allowed_cidrs"
        if self.expires_at is not None and (other.expires_at is None or other.expires_at > self.expires_at):
            return "expires_at"
        return None

    def require(self, granted: "KeyBounds") -> None:
        """Raises `BoundNotHeld` where `granted` reaches further than these, those of the managing key."""
        match self.exceeded_by(granted):
            case "allowed_cidrs":
                raise BoundNotHeld(
                    "allowed_cidrs",
                    f"allowed_cidrs must lie within those of the key that manages: {', '.join(self.networks)}",
                )
            case "expires_at":
                end = "" if self.expires_at is None else self.expires_at.isoformat()
                raise BoundNotHeld(
                    "expires_at", f"expires_at must not be later than that of the key that manages: {end}"
                )
