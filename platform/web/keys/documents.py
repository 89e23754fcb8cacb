"""Request and response schemas of `/tenant/v1/keys`.

Invariant: no response contains a secret or its digest, except that a new key is in the response to its creation.
"""

from typing import Annotated

from pydantic import Field, WithJsonSchema

from loraplex.platform.web.request_bodies import RequestModel, Time
from loraplex.platform.web.responses import ResponseModel
from loraplex.tenants.api_keys.keys import MAX_GRACE_SECONDS, KeyChange
from loraplex.tenants.api_keys.networks import MAX_NETWORKS
from loraplex.tenants.models import ApiKey
from loraplex.tenants.names import KEY_NAME_MAX_LENGTH
from loraplex.tenants.records import UtcTime
from loraplex.tenants.scopes import INFERENCE, TENANT_SCOPES

Name = Annotated[str, Field(min_length=1, max_length=KEY_NAME_MAX_LENGTH)]
Scope = Annotated[str, WithJsonSchema({"type": "string", "enum": sorted(TENANT_SCOPES)})]
Scopes = Annotated[list[Scope], Field(min_length=1, max_length=2 * len(TENANT_SCOPES))]
Networks = Annotated[list[str], Field(max_length=MAX_NETWORKS)]


class NewKeyBody(RequestModel):
    """`allowed_cidrs`: networks from which the key may be used; an empty list allows all. Without `allowed_cidrs` or
    `expires_at`, the value of the key that creates it applies; neither may exceed that value.
    """

    name: Name
    scopes: Scopes = Field(default_factory=lambda: [INFERENCE])
    expires_at: Time | None = None
    allowed_cidrs: Networks = Field(default_factory=list)

    def bounds(self) -> KeyChange:
        """Return the given restrictions: networks and expiry."""
        given: KeyChange = {}
        if "expires_at" in self.model_fields_set:
            given["expires_at"] = self.expires_at
        if "allowed_cidrs" in self.model_fields_set:
            given["allowed_cidrs"] = self.allowed_cidrs
        return given


class KeyPatch(RequestModel):
    """The fields to change; those that are absent stay unchanged."""

    name: Name = Field(default_factory=str)
    scopes: Scopes = Field(default_factory=list)
    expires_at: Time | None = None
    allowed_cidrs: Networks = Field(default_factory=list)

    def change(self) -> KeyChange:
        """Return the given fields."""
        given: KeyChange = {}
        if "name" in self.model_fields_set:
            given["name"] = self.name
        if "scopes" in self.model_fields_set:
            given["scopes"] = self.scopes
        if "expires_at" in self.model_fields_set:
            given["expires_at"] = self.expires_at
        if "allowed_cidrs" in self.model_fields_set:
            given["allowed_cidrs"] = self.allowed_cidrs
        return given


class RotateBody(RequestModel):
    """`grace_seconds`: how long the old key stays valid next to the new one."""

    grace_seconds: int = Field(default=0, ge=0, le=MAX_GRACE_SECONDS)


class KeyDocument(ResponseModel):
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


class NewKeyDocument(KeyDocument):
    """`api_key` is returned here and never again."""

    api_key: str


def to_response(record: ApiKey) -> KeyDocument:
    return KeyDocument(
        id=record.key_id,
        name=record.name,
        environment=record.environment,
        scopes=record.scopes,
        allowed_cidrs=record.allowed_cidrs,
        created_by=record.created_by,
        created_at=record.created_at,
        expires_at=record.expires_at,
        revoked_at=record.revoked_at,
        last_used_at=record.last_used_at,
        replaced_by=None if record.successor is None else record.successor.key_id,
        parent_id=record.parent_key_id,
        limit_root=record.root_key_id,
    )
