"""The types of request parameters: annotations of pydantic fields that describe the allowed values and check one JSON value.

Invariant: any other value is refused with the parameter's name, the value and the allowed values; none is clamped or coerced.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeGuard

from pydantic import BaseModel, GetCoreSchemaHandler, ValidatorFunctionWrapHandler
from pydantic_core import CoreSchema, PydanticCustomError, SchemaValidator, core_schema

from loraplex.platform.parameters.value_errors import REFUSED_KEY, UNSUPPORTED, checked, refused

_TOKEN_ID: Final = re.compile("^(0|[1-9][0-9]{0,9})$")
_IDENTIFIER: Final = "^[A-Za-z0-9_-]+$"
MAX_IDENTIFIER: Final = 64
MAX_PROMPTS: Final = 64
MAX_TOKEN_ID: Final = 2**31 - 1


def bounded_list(items: CoreSchema, low: int, high: int, allowed: str) -> CoreSchema:
    """Check the length of a list, then its items up to the first error."""

    def check_length(value: object) -> object:
        if not isinstance(value, list) or not low <= len(value) <= high:
            raise refused(allowed, value)
        return value

    schema = core_schema.list_schema(items, min_length=low, max_length=high, fail_fast=True)
    return core_schema.no_info_before_validator_function(check_length, schema)


def bounded_object(
    keys: CoreSchema, values: CoreSchema, high: int, allowed: str, about: dict[str, Any] | None = None
) -> CoreSchema:
    """Check the number of an object's keys, then each key and value up to the first error."""

    def check_size(value: object) -> object:
        if not isinstance(value, dict) or len(value) > high:
            raise refused(allowed, value)
        return value

    schema = core_schema.dict_schema(keys, values, max_length=high, fail_fast=True, metadata=about)
    return core_schema.no_info_before_validator_function(check_size, schema)


class Kind(ABC):
    """One type of parameter: `Annotated[…, kind]` checks a field of a pydantic model, whatever its Python type."""

    @property
    @abstractmethod
    def allowed(self) -> str:
        """The allowed values, as text that follows "must be"."""

    @abstractmethod
    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Build the validator of a JSON value that is not null. Its errors are of the types of this module."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return self.schema(handler)


@dataclass(frozen=True)
class Integer(Kind):
    low: int
    high: int

    @property
    def allowed(self) -> str:
        return f"an integer in {self.low}..{self.high}"

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        return checked(core_schema.int_schema(strict=True, ge=self.low, le=self.high), self.allowed)


@dataclass(frozen=True)
class Number(Kind):
    low: float
    high: float

    @property
    def allowed(self) -> str:
        return f"a number in {self.low:g}..{self.high:g}"

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = core_schema.float_schema(strict=True, allow_inf_nan=False, ge=self.low, le=self.high)
        return checked(schema, self.allowed)


@dataclass(frozen=True)
class Boolean(Kind):
    only: bool | None = None

    @property
    def allowed(self) -> str:
        return "true or false" if self.only is None else str(self.only).lower()

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        if self.only is None:
            return checked(core_schema.bool_schema(strict=True), self.allowed)
        # As a literal of pydantic, 0 is false.
        value = core_schema.literal_schema([self.only])
        return core_schema.no_info_plain_validator_function(self._read_only, json_schema_input_schema=value)

    def _read_only(self, value: object) -> object:
        if value is not self.only:
            raise refused(self.allowed, value)
        return value


@dataclass(frozen=True)
class Text(Kind):
    """A string; its bounds count bytes in UTF-8."""

    max_bytes: int
    min_bytes: int = 1

    @property
    def allowed(self) -> str:
        return f"a string of {self.min_bytes}..{self.max_bytes} bytes in UTF-8"

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = core_schema.str_schema(strict=True, min_length=self.min_bytes, max_length=self.max_bytes)
        return core_schema.no_info_after_validator_function(self._check_bytes, checked(schema, self.allowed))

    def _check_bytes(self, value: str) -> str:
        if not value.isascii() and len(value.encode()) > self.max_bytes:
            raise refused(self.allowed, value)
        return value


@dataclass(frozen=True)
class AnyText(Kind):
    """A string of any length."""

    allowed = "a string"

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        return checked(core_schema.str_schema(strict=True), self.allowed)


@dataclass(frozen=True)
class Identifier(Kind):
    """A name as the OpenAI API allows it for functions and schemas."""

    max_length: int = MAX_IDENTIFIER

    @property
    def allowed(self) -> str:
        return f"1..{self.max_length} characters of a-z, A-Z, 0-9, _ and -"

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = core_schema.str_schema(strict=True, pattern=_IDENTIFIER, max_length=self.max_length)
        return checked(schema, self.allowed)


@dataclass(frozen=True)
class Choice(Kind):
    values: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return "one of " + ", ".join(f'"{value}"' for value in self.values)

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        return checked(core_schema.literal_schema(list(self.values)), self.allowed)


@dataclass(frozen=True)
class ListOf(Kind):
    """A list of objects or other values, in words `items`."""

    item: type[BaseModel] | Kind
    low: int
    high: int
    items: str

    @property
    def allowed(self) -> str:
        return f"a list of {f'{self.low}..' if self.low else 'up to '}{self.high} {self.items}"

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        item = (
            self.item.schema(handler) if isinstance(self.item, Kind) else handler.generate_schema(self.item)
        )
        return bounded_list(item, self.low, self.high, self.allowed)


@dataclass(frozen=True)
class AnyObject(Kind):
    """An object of any members."""

    allowed = "an object"

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        return checked(core_schema.dict_schema(strict=True), self.allowed)


@dataclass(frozen=True)
class JsonSchemaObject(AnyObject):
    """A JSON schema. It is analysed elsewhere, in another process."""

    allowed = "a JSON schema as an object"


@dataclass(frozen=True)
class StopStrings(Kind):
    max_items: int
    max_bytes: int

    @property
    def allowed(self) -> str:
        return f"a string or a list of up to {self.max_items} strings of 1..{self.max_bytes} bytes in UTF-8"

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        text = core_schema.str_schema(min_length=1, max_length=self.max_bytes)
        texts = core_schema.list_schema(text, max_length=self.max_items)
        shape = core_schema.union_schema([core_schema.str_schema(max_length=self.max_bytes), texts])
        return core_schema.no_info_plain_validator_function(self._read, json_schema_input_schema=shape)

    def _read(self, value: object) -> tuple[str, ...]:
        if value == "":
            return ()
        strings = [value] if isinstance(value, str) else value
        if not isinstance(strings, list) or len(strings) > self.max_items:
            raise refused(self.allowed, value)
        for string in strings:
            if not isinstance(string, str) or not 1 <= len(string.encode()) <= self.max_bytes:
                raise refused(self.allowed, string)
        return tuple(strings)


@dataclass(frozen=True)
class TokenIds(Kind):
    """A list of token ids. They are checked against the vocabulary later, where the model is known."""

    max_items: int

    @property
    def allowed(self) -> str:
        return f"a list of up to {self.max_items} token ids"

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        ids = core_schema.list_schema(token_id_schema(), max_length=self.max_items)
        return core_schema.no_info_after_validator_function(tuple, checked(ids, self.allowed))


@dataclass(frozen=True)
class LogitBias(Kind):
    max_items: int
    bias: Number

    @property
    def allowed(self) -> str:
        return f"an object of up to {self.max_items} token ids, each with {self.bias.allowed}"

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        key = core_schema.no_info_plain_validator_function(
            self._read_key, json_schema_input_schema=core_schema.str_schema()
        )
        # Said of the names: clients that are generated from the document know no `patternProperties`.
        about = {"pydantic_js_updates": {"propertyNames": {"pattern": _TOKEN_ID.pattern}}}
        return bounded_object(key, self.bias.schema(handler), self.max_items, self.allowed, about)

    def _read_key(self, key: str) -> int:
        # With leading zeros, two keys could name the same id.
        if not _TOKEN_ID.fullmatch(key):
            raise PydanticCustomError(REFUSED_KEY, self.allowed)
        return int(key)


@dataclass(frozen=True)
class Metadata(Kind):
    max_items: int
    key: Text
    value: Text

    @property
    def allowed(self) -> str:
        sizes = f"of up to {self.key.max_bytes} to ones of up to {self.value.max_bytes} bytes"
        return f"an object of up to {self.max_items} pairs of strings, {sizes}"

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        key = checked(self.key.schema(handler), self.key.allowed, REFUSED_KEY)
        return bounded_object(key, self.value.schema(handler), self.max_items, self.allowed)


Scalar: TypeAlias = str | int | float | bool


@dataclass(frozen=True)
class Scalars(Kind):
    """An object of names with strings, numbers or booleans. Those with null are left out."""

    max_items: int
    max_bytes: int
    largest: int

    @property
    def allowed(self) -> str:
        values = f"a string of up to {self.max_bytes} bytes, a number in -{self.largest}..{self.largest}"
        return f"an object of up to {self.max_items} names, each with {values}, or true or false"

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        kinds = (core_schema.str_schema(), core_schema.float_schema(), core_schema.bool_schema())
        value = core_schema.nullable_schema(core_schema.union_schema([*kinds]))
        documented = core_schema.dict_schema(core_schema.str_schema(), value, max_length=self.max_items)
        return core_schema.no_info_plain_validator_function(self._read, json_schema_input_schema=documented)

    def _read(self, value: object) -> dict[str, Scalar]:
        if not isinstance(value, dict) or len(value) > self.max_items:
            raise refused(self.allowed, value)
        given = {name: each for name, each in value.items() if each is not None}
        for each in given.values():
            is_text = isinstance(each, str) and len(each.encode()) <= self.max_bytes
            if not is_text and not (isinstance(each, int | float) and abs(each) <= self.largest):
                raise refused(self.allowed, each)
        return given


@dataclass(frozen=True)
class Refused(Kind):
    """A known name whose feature is not offered; values that do not request the feature are accepted and ignored."""

    reason: str
    harmless: tuple[bool | int | str, ...] = ()

    @property
    def allowed(self) -> str:
        harmless = [str(value).lower() if isinstance(value, bool) else repr(value) for value in self.harmless]
        return " or ".join(["absent", *harmless])

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        values = (
            core_schema.literal_schema(list(self.harmless)) if self.harmless else core_schema.none_schema()
        )
        return core_schema.no_info_plain_validator_function(self._read, json_schema_input_schema=values)

    def _read(self, value: object) -> None:
        if any(value == each and type(value) is type(each) for each in self.harmless):
            return
        otherwise = f" It must be {self.allowed}." if self.harmless else ""
        raise PydanticCustomError(UNSUPPORTED, f"is not supported: {self.reason}.{otherwise}")


Prompt: TypeAlias = str | list[int]


@dataclass(frozen=True)
class Prompts(Kind):
    """The type of `prompt`. Every form is read into a list of prompts, none of them empty."""

    allowed = (
        "a string, a list of strings, a list of token ids or a list of such lists; "
        f"1..{MAX_PROMPTS} prompts, none of them empty"
    )

    def schema(self, handler: GetCoreSchemaHandler) -> CoreSchema:
        text = core_schema.str_schema(min_length=1)
        ids = core_schema.list_schema(token_id_schema(), min_length=1)
        prompt = core_schema.no_info_plain_validator_function(self._prompt)
        lists = [core_schema.list_schema(each, min_length=1, max_length=MAX_PROMPTS) for each in (text, ids)]
        return core_schema.no_info_wrap_validator_function(
            self._read,
            bounded_list(prompt, 1, MAX_PROMPTS, self.allowed),
            json_schema_input_schema=core_schema.union_schema([text, ids, *lists]),
        )

    def _read(self, value: object, read_list: ValidatorFunctionWrapHandler) -> list[Prompt]:
        if isinstance(value, str):
            return [self._prompt(value)]
        if _is_token_list(value):
            return [value]
        if isinstance(value, list) and len({type(each) for each in value}) > 1:
            raise refused(self.allowed, value)
        prompts: list[Prompt] = read_list(value)
        return prompts

    def _prompt(self, value: object) -> Prompt:
        if isinstance(value, str) and value:
            return value
        if _is_token_list(value):
            return value
        raise refused(self.allowed, value)


def token_id_schema() -> CoreSchema:
    """Build the validator of one token id: a non-negative integer of at most 31 bits."""
    return core_schema.int_schema(strict=True, ge=0, le=MAX_TOKEN_ID)


_TOKEN_LIST: Final = SchemaValidator(
    core_schema.list_schema(token_id_schema(), strict=True, min_length=1, fail_fast=True)
)


def _is_token_list(value: object) -> TypeGuard[list[int]]:
    return _TOKEN_LIST.isinstance_python(value)
