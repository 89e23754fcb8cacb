"""Ids in paths: parsed by the type of a route's parameter, such as `Annotated[UUID, PathId(WebhookNotFound, "no such webhook")]`."""

from dataclasses import dataclass
from typing import Annotated, Any, Final
from uuid import UUID

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from loraplex.platform.errors import InvalidParameter
from loraplex.tenants.errors import TenantNotFound
from loraplex.tenants.ids import canonical_uuid


@dataclass(frozen=True, slots=True)
class PathId:
    """The id of something that a path names. A text that is no UUID in canonical form raises `error`, as an unknown id does.
    `message` may quote the text, as `{}`.
    """

    error: type[Exception]
    message: str

    def parse(self, text: str) -> UUID:
        """Parse the text of a path."""
        parsed = canonical_uuid(text)
        if parsed is None:
            raise self.error(self.message.format(text[:40]))
        return parsed

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.parse)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"type": "string"}


TENANT_ID: Final = PathId(TenantNotFound, "no tenant {}")
TenantId = Annotated[UUID, TENANT_ID]
"""The id of a tenant in a path."""


def filtered_tenant(text: str) -> UUID:
    """Parse the tenant id of the filter. Raises `InvalidParameter`."""
    tenant_id = canonical_uuid(text)
    if tenant_id is None:
        raise InvalidParameter("`tenant_id` must be a UUID.", param="tenant_id")
    return tenant_id
