"""Parses `response_format` (OpenAI API) and `structured_outputs` (vLLM); schemas are not analysed here."""

from dataclasses import dataclass
from typing import Any, Final

from loraplex.grammar.constraints import (
    Choice,
    ContextFreeGrammar,
    JsonObject,
    JsonSchema,
    OutputFormat,
    Regex,
    SchemaLimits,
    StructuralTag,
)
from loraplex.platform.errors import InvalidBody, InvalidParameter
from loraplex.platform.parameters import value_types as kinds
from loraplex.platform.parameters.json_object import BodyLimits, parse_object
from loraplex.platform.parameters.value_types import Boolean, Identifier, Text, closed_fields, needed, refuse

BOUNDS: Final = SchemaLimits()
MAX_DESCRIPTION_BYTES: Final = 65_536
_JSON_SCHEMA: Final = '{"type": "json_schema", "json_schema": {name, schema, description?, strict?}}'
_FORMATS: Final = ("json", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The type of `response_format`. Plain text is None."""

    @property
    def allowed(self) -> str:
        return '{"type": "text"}, {"type": "json_object"} or ' + _JSON_SCHEMA

    def read(self, name: str, value: object) -> OutputFormat | None:
        if not isinstance(value, dict):
            refuse(name, value, self.allowed)
        names = ("text", "json_object", "json_schema")
        kind = kinds.Choice(names).read(f"{name}.type", needed(value, name, "type"))
        fields = closed_fields(
            name, value, ("type", "json_schema") if kind == names[2] else ("type",), self.allowed
        )
        if kind == "json_schema":
            return _json_schema(f"{name}.json_schema", needed(fields, name, "json_schema"))
        return JsonObject() if kind == "json_object" else None


@dataclass(frozen=True, slots=True)
class Structure:
    """`close`: the document is completed within the last tokens instead of truncated."""

    format: OutputFormat | None
    close: bool


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The type of `structured_outputs`."""

    @property
    def allowed(self) -> str:
        formats = ", ".join(f"`{name}`" for name in _FORMATS)
        return f"an object with one of {formats}, and `close` (true or false) together with it or alone"

    def read(self, name: str, value: object) -> Structure:
        fields = closed_fields(name, value, (*_FORMATS, "close"), self.allowed)
        given = [key for key in _FORMATS if key in fields]
        if len(given) > 1 or not fields:
            refuse(name, value, self.allowed)
        close = Boolean().read(f"{name}.close", fields.get("close", False))
        return Structure(_format(given[0], name, fields[given[0]]) if given else None, close)


def _json_schema(name: str, value: object) -> JsonSchema:
    fields = closed_fields(name, value, ("name", "schema", "description", "strict"), _JSON_SCHEMA)
    Identifier().read(f"{name}.name", needed(fields, name, "name"))
    Text(MAX_DESCRIPTION_BYTES, min_bytes=0).read(f"{name}.description", fields.get("description", ""))
    strict = Boolean().read(f"{name}.strict", fields.get("strict", False))
    schema = needed(fields, name, "schema")
    if not isinstance(schema, dict):
        refuse(f"{name}.schema", schema, "a JSON schema as an object")
    return JsonSchema(schema, strict, f"{name}.schema")


def _format(kind: str, parent: str, value: object) -> OutputFormat:
    name = f"{parent}.{kind}"
    if kind == "json":
        return JsonSchema(_object(name, value, BOUNDS.max_bytes), strict=False, param=name)
    if kind == "regex":
        return Regex(Text(BOUNDS.max_pattern_bytes).read(name, value))
    if kind == "choice":
        return Choice(_options(name, value))
    if kind == "grammar":
        return ContextFreeGrammar(Text(BOUNDS.max_text_bytes).read(name, value))
    return StructuralTag(_object(name, value, BOUNDS.max_text_bytes))


def _options(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= BOUNDS.max_choices:
        refuse(name, value, f"a list of 1..{BOUNDS.max_choices} strings")
    option = Text(BOUNDS.max_pattern_bytes)
    return tuple(option.read(f"{name}[{index}]", each) for index, each in enumerate(value))


def _object(name: str, value: object, max_bytes: int) -> dict[str, Any]:
    """Parse an object, or its JSON text of at most `max_bytes` bytes."""
    if isinstance(value, dict):
        return value
    allowed = f"an object or its JSON text of up to {max_bytes} bytes"
    if not isinstance(value, str) or len(value.encode()) > max_bytes:
        refuse(name, value, allowed)
    try:
        return parse_object(value.encode(), BodyLimits(max_bytes=max_bytes))
    except (InvalidBody, InvalidParameter) as error:
        raise InvalidParameter(f"`{name}` must be {allowed}: {error}", param=name) from error
