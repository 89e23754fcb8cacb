"""Ids in paths: parsed by the type of a route's parameter, such as `Annotated[UUID, PathId(WebhookNotFound, "no such webhook")]`."""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from loraplex.tenants.ids import canonical_uuid


@dataclass(frozen=True, slots=True)
class PathId:
    """The id of something that a path names. A text that is no UUID in canonical form raises `error`, as an unknown id does."""

    error: type[Exception]
    message: str

    def parse(self, text: str) -> UUID:
        """Parse the text of a path."""
        parsed = canonical_uuid(text)
        if parsed is None:
            raise self.error(self.message)
        return parsed

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.parse)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"type": "string"}
