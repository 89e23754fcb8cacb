"""Keys as tenants see them. Invariant: no record has a secret or its digest but that of a creation or rotation."""

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias, TypedDict
from uuid import UUID

from pydantic import Field

from loraplex.tenants.records import OneTimeSecret, Record, UtcTime

if TYPE_CHECKING:
    from loraplex.tenants.models import ApiKey

MAX_GRACE_SECONDS: Final = 30 * 24 * 3600
"""The longest time for which a rotated key goes on."""
KeyState: TypeAlias = Literal["working", "expired", "revoked"]
KEY_STATES: Final[tuple[KeyState, ...]] = ("working", "expired", "revoked")


class KeyChange(TypedDict, total=False):
    """The fields of a key that may change; those that are absent stay."""

    name: str
    scopes: Sequence[str]
    expires_at: datetime | None
    allowed_cidrs: Sequence[str]


class KeyDocument(Record):
    """`id` is the public part of the key. `replaced_by` is the id of the key that replaced it by rotation. `parent_id` is that of the
    key that minted it, or that it replaced. `limit_root` is that of the topmost of its parents and itself that has limits: all
    keys below that one share these limits, as its `group`.
    """

    id: str
    name: str
    environment: str
    scopes: list[str]
    allowed_cidrs: list[str]
    created_by: str | None
    created_at: UtcTime
    expires_at: UtcTime | None
    revoked_at: UtcTime | None
    last_used_at: UtcTime | None
    replaced_by: str | None
    parent_id: str | None
    limit_root: str | None
    # The key's internal id, by which listings sort keys of one time.
    row_id: UUID = Field(default=UUID(int=0), exclude=True, repr=False)
    # Sent as the ETag, not in the body: so a result that is stored for a repetition has none.
    revision: int = Field(default=0, exclude=True)

    @classmethod
    def of(cls, row: "ApiKey", **more: Any) -> Self:
        """Return the record of a key that was read by `KeyRepository`: a row's `id`, `replaced_by`, `parent_id` and `limit_root`
        are internal ids, a record's are public ones. `more`: the fields that a record besides has.
        """
        return cls(
            id=row.key_id,
            row_id=row.id,
            name=row.name,
            environment=row.environment,
            scopes=row.scopes,
            allowed_cidrs=row.allowed_cidrs,
            created_by=row.created_by,
            created_at=row.created_at,
            expires_at=row.expires_at,
            revoked_at=row.revoked_at,
            last_used_at=row.last_used_at,
            replaced_by=None if row.successor is None else row.successor.key_id,
            parent_id=row.parent_key_id,
            limit_root=row.root_key_id,
            revision=row.revision,
            **more,
        )


class NewKeyDocument(KeyDocument, OneTimeSecret):
    """`api_key` is returned here and never again."""

    api_key: str = Field(repr=False)
