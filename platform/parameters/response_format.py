"""`response_format` (OpenAI API) and `structured_outputs` (vLLM); schemas are not analysed here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from loraplex.grammar import constraints
from loraplex.grammar.constraints import (
    ContextFreeGrammar,
    JsonObject,
    JsonSchema,
    OutputFormat,
    Regex,
    SchemaLimits,
    StructuralTag,
)
from loraplex.platform.errors import InvalidBody, InvalidParameter
from loraplex.platform.parameters.json_object import BodyLimits, parse_object
from loraplex.platform.parameters.request_object import RequestObject
from loraplex.platform.parameters.tools import DESCRIPTION
from loraplex.platform.parameters.value_errors import refused
from loraplex.platform.parameters.value_types import (
    Boolean,
    Choice,
    Identifier,
    JsonSchemaObject,
    Kind,
    ListOf,
    Text,
)

BOUNDS: Final = SchemaLimits()
_JSON_SCHEMA: Final = '{"type": "json_schema", "json_schema": {name, schema, description?, strict?}}'
_RESPONSE_FORMAT: Final = (
    f'{{"type": "text"}}, {{"type": "json_object", schema? or value?}}, {_JSON_SCHEMA} '
    'or {"type": "structural_tag", "format": …}'
)
_FORMATS: Final = ("json", "regex", "choice", "grammar", "structural_tag")
_STRUCTURED: Final = (
    f"an object with one of {', '.join(f'`{name}`' for name in _FORMATS)}, "
    "`close` (true or false) together with it or alone, and `probabilities` (true or false) with `choice`"
)


@dataclass(frozen=True)
class _ObjectOrText(Kind):
    """An object, or its JSON text of at most `max_bytes` bytes. `param`: its place in the body."""

    max_bytes: int
    param: str

    @property
    def allowed(self) -> str:
        return f"an object or its JSON text of up to {self.max_bytes} bytes"

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        text = core_schema.str_schema(max_length=self.max_bytes)
        forms = core_schema.union_schema([core_schema.dict_schema(), text])
        return core_schema.no_info_plain_validator_function(self._read, json_schema_input_schema=forms)

    def _read(self, value: object) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        if not isinstance(value, str) or len(value.encode()) > self.max_bytes:
            raise refused(self.allowed, value)
        try:
            return parse_object(value.encode(), BodyLimits(max_bytes=self.max_bytes))
        except (InvalidBody, InvalidParameter) as error:
            message = f"`{self.param}` must be {self.allowed}: {error}"
            raise InvalidParameter(message, param=self.param) from error


class _Format(RequestObject):
    allowed: ClassVar[str] = _RESPONSE_FORMAT
    type: Annotated[str, Choice(("text", "json_object", "json_schema", "structural_tag"))]

    def output_format(self) -> OutputFormat | None:
        """Return the constraint of the output; plain text is None."""
        return None


class TextFormat(_Format):
    """Plain text."""

    type: Annotated[str, Choice(("text",))]


class JsonObjectFormat(_Format):
    """Any JSON object, or with `schema` a JSON value that satisfies it, as llama.cpp and others read it.

    `value`: the same, as `huggingface_hub` writes every schema.
    """

    type: Annotated[str, Choice(("json_object",))]
    json_schema: Annotated[dict[str, Any] | None, JsonSchemaObject()] = Field(None, alias="schema")
    value: Annotated[dict[str, Any] | None, JsonSchemaObject()] = None

    def output_format(self) -> OutputFormat:
        if self.json_schema is not None and self.value is not None:
            message = "`response_format` has `schema` and `value`; one of them is allowed."
            raise InvalidParameter(message, param="response_format.value")
        if self.json_schema is not None:
            return JsonSchema(self.json_schema, False, "response_format.schema")
        return JsonObject() if self.value is None else JsonSchema(self.value, False, "response_format.value")


class StructuralTagFormat(_Format):
    """Text of xgrammar's format language."""

    type: Annotated[str, Choice(("structural_tag",))]
    format: Annotated[dict[str, Any], _ObjectOrText(BOUNDS.max_text_bytes, "response_format.format")]

    def output_format(self) -> OutputFormat:
        return StructuralTag({"type": "structural_tag", "format": self.format}, "response_format")


class NamedSchema(RequestObject):
    """A JSON schema. `strict`: refuse one that cannot be enforced while the output is generated."""

    allowed: ClassVar[str] = _JSON_SCHEMA
    name: Annotated[str, Identifier()]
    json_schema: Annotated[dict[str, Any], JsonSchemaObject()] = Field(alias="schema")
    description: Annotated[str, DESCRIPTION] = ""
    strict: Annotated[bool, Boolean()] = False


class JsonSchemaFormat(_Format):
    """A JSON value that satisfies a schema."""

    type: Annotated[str, Choice(("json_schema",))]
    json_schema: NamedSchema

    def output_format(self) -> OutputFormat:
        wanted = self.json_schema
        return JsonSchema(wanted.json_schema, wanted.strict, "response_format.json_schema.schema")


_MODELS: Final[Mapping[str, type[_Format]]] = {
    "text": TextFormat,
    "json_object": JsonObjectFormat,
    "json_schema": JsonSchemaFormat,
    "structural_tag": StructuralTagFormat,
}


@dataclass(frozen=True)
class ResponseFormat(Kind):
    """The type of `response_format`. Plain text is None."""

    allowed = _RESPONSE_FORMAT

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        models = {kind: handler.generate_schema(model) for kind, model in _MODELS.items()}
        return core_schema.no_info_plain_validator_function(
            _read_format, json_schema_input_schema=core_schema.tagged_union_schema(models, "type")
        )


def _read_format(value: object) -> OutputFormat | None:
    if isinstance(value, dict):
        kind = value.get("type")
        if isinstance(kind, str) and kind in _MODELS:
            return _MODELS[kind].check(value).output_format()
        # Only the type is at fault: the other fields belong to a type that is not known.
        value = {"type": kind}
    return _Format.check(value).output_format()


@dataclass(frozen=True, slots=True)
class Structure:
    """`close`: the document is completed within the last tokens instead of truncated. `probabilities`: of each choice."""

    format: OutputFormat | None
    close: bool
    probabilities: bool = False


class StructuredOutputsObject(RequestObject):
    """One format with vLLM's names. `close`: complete the document within `max_tokens` instead of truncating it."""

    allowed: ClassVar[str] = _STRUCTURED
    json_schema: Annotated[
        dict[str, Any] | None, _ObjectOrText(BOUNDS.max_bytes, "structured_outputs.json")
    ] = Field(None, alias="json")
    regex: Annotated[str | None, Text(BOUNDS.max_pattern_bytes)] = None
    choice: Annotated[
        list[str] | None, ListOf(Text(BOUNDS.max_pattern_bytes), 1, BOUNDS.max_choices, "strings")
    ] = None
    grammar: Annotated[str | None, Text(BOUNDS.max_text_bytes)] = None
    structural_tag: Annotated[
        dict[str, Any] | None, _ObjectOrText(BOUNDS.max_text_bytes, "structured_outputs.structural_tag")
    ] = None
    close: Annotated[bool, Boolean()] = False
    probabilities: Annotated[bool, Boolean()] = False

    def output_formats(self) -> list[OutputFormat]:
        """Return every format that the object names."""
        formats: list[OutputFormat] = []
        if self.json_schema is not None:
            formats.append(JsonSchema(self.json_schema, False, "structured_outputs.json"))
        if self.regex is not None:
            formats.append(Regex(self.regex))
        if self.choice is not None:
            formats.append(constraints.Choice(tuple(self.choice)))
        if self.grammar is not None:
            formats.append(ContextFreeGrammar(self.grammar))
        if self.structural_tag is not None:
            formats.append(StructuralTag(self.structural_tag))
        return formats


@dataclass(frozen=True)
class StructuredOutputs(Kind):
    """The type of `structured_outputs`."""

    allowed = _STRUCTURED

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        model = handler.generate_schema(StructuredOutputsObject)
        return core_schema.no_info_plain_validator_function(self._read, json_schema_input_schema=model)

    def _read(self, value: object) -> Structure:
        wanted = StructuredOutputsObject.check(value)
        formats = wanted.output_formats()
        lacks_choice = wanted.probabilities and wanted.choice is None
        if len(formats) > 1 or not wanted.model_fields_set or lacks_choice:
            raise refused(self.allowed, value)
        return Structure(formats[0] if formats else None, wanted.close, wanted.probabilities)
