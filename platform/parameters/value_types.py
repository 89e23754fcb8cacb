"""The types of request parameters: each describes its allowed values and checks one JSON value.

Invariant: any other value is refused with the parameter's name, the value and the allowed values; none is clamped or coerced.
"""

import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol, TypeAlias, TypeGuard

from loraplex.platform.errors import (
    InvalidParameter,
    MissingParameter,
    UnknownParameter,
    UnsupportedParameter,
)

MAX_EXCERPT: Final = 60
CONTENT: Final = frozenset(
    {
        *("messages", "prompt", "content", "text", "arguments", "stop", "user", "metadata", "cache_salt"),
        *("tools", "parameters", "schema", "description", "name"),
        *("regex", "choice", "grammar", "json", "structural_tag"),
    }
)
"""Parameters whose values are a tenant's content: error messages do not quote them."""
_INDEX: Final = re.compile(r"\[\d+\]")
_TOKEN_ID: Final = re.compile(r"0|[1-9][0-9]{0,9}")
_IDENTIFIER: Final = re.compile(r"[A-Za-z0-9_-]+")


def excerpt_of(value: object) -> str:
    """Describe a JSON value for an error message, with at most `MAX_EXCERPT` characters."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = json.dumps(value[:MAX_EXCERPT] if isinstance(value, str) else value, ensure_ascii=False)
    return text if len(text) <= MAX_EXCERPT else f"{text[:MAX_EXCERPT]}…"


def refuse(name: str, value: object, allowed: str) -> NoReturn:
    """Raise `InvalidParameter` for one value. Possible content of a tenant is not quoted, only its type and length."""
    last = _INDEX.sub("", name).rpartition(".")[2]
    given_value = (
        f"a string of {len(value)}" if isinstance(value, str) and last in CONTENT else excerpt_of(value)
    )
    raise InvalidParameter(f"`{name}` is {given_value}, but must be {allowed}.", param=name)


def closed_fields(name: str, value: object, names: Collection[str], allowed: str) -> dict[str, Any]:
    """Return the fields of an object that are not null. Raises `UnknownParameter` with the full path of another name."""
    if not isinstance(value, dict):
        refuse(name, value, allowed)
    for key in value:
        if key not in names:
            path = f"{name}.{key[:64]}"
            raise UnknownParameter(f"Unknown parameter `{path}`: `{name}` is {allowed}.", param=path)
    return {key: each for key, each in value.items() if each is not None}


def needed(fields: dict[str, Any], name: str, key: str) -> Any:
    """Return field `key` of the object at `name`. Raises `MissingParameter`."""
    if key not in fields:
        raise MissingParameter(f"`{name}.{key}` is required.", param=f"{name}.{key}")
    return fields[key]


class Kind(Protocol):
    """One type of parameter."""

    @property
    def allowed(self) -> str:
        """The allowed values, as text that follows "must be"."""
        ...

    def read(self, name: str, value: object) -> object:
        """Return the checked value. Raises `InvalidParameter`."""
        ...


@dataclass(frozen=True, slots=True)
class Integer:
    low: int
    high: int

    @property
    def allowed(self) -> str:
        return f"an integer in {self.low}..{self.high}"

    def read(self, name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not self.low <= value <= self.high:
            refuse(name, value, self.allowed)
        return value


@dataclass(frozen=True, slots=True)
class Number:
    low: float
    high: float
    low_allowed: bool = True

    @property
    def allowed(self) -> str:
        above = "" if self.low_allowed else f", above {self.low:g}"
        return f"a number in {self.low:g}..{self.high:g}{above}"

    def read(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            refuse(name, value, self.allowed)
        inside = math.isfinite(value) if isinstance(value, float) else True
        if not inside or not self.low <= value <= self.high or (value == self.low and not self.low_allowed):
            refuse(name, value, self.allowed)
        return float(value)


@dataclass(frozen=True, slots=True)
class Boolean:
    only: bool | None = None

    @property
    def allowed(self) -> str:
        return "true or false" if self.only is None else str(self.only).lower()

    def read(self, name: str, value: object) -> bool:
        if not isinstance(value, bool) or (self.only is not None and value is not self.only):
            refuse(name, value, self.allowed)
        return value


@dataclass(frozen=True, slots=True)
class Text:
    """A string; its bounds count bytes in UTF-8."""

    max_bytes: int
    min_bytes: int = 1

    @property
    def allowed(self) -> str:
        return f"a string of {self.min_bytes}..{self.max_bytes} bytes in UTF-8"

    def read(self, name: str, value: object) -> str:
        if not isinstance(value, str) or not self.min_bytes <= len(value.encode()) <= self.max_bytes:
            refuse(name, value, self.allowed)
        return value


@dataclass(frozen=True, slots=True)
class Identifier:
    """A name as the OpenAI API allows it for functions and schemas."""

    max_length: int = 64

    @property
    def allowed(self) -> str:
        return f"1..{self.max_length} characters of a-z, A-Z, 0-9, _ and -"

    def read(self, name: str, value: object) -> str:
        if not isinstance(value, str) or len(value) > self.max_length or not _IDENTIFIER.fullmatch(value):
            refuse(name, value, self.allowed)
        return value


@dataclass(frozen=True, slots=True)
class Choice:
    values: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return "one of " + ", ".join(f'"{value}"' for value in self.values)

    def read(self, name: str, value: object) -> str:
        if not isinstance(value, str) or value not in self.values:
            refuse(name, value, self.allowed)
        return value


@dataclass(frozen=True, slots=True)
class StopStrings:
    max_items: int
    max_bytes: int

    @property
    def allowed(self) -> str:
        return f"a string or a list of up to {self.max_items} strings of 1..{self.max_bytes} bytes in UTF-8"

    def read(self, name: str, value: object) -> tuple[str, ...]:
        strings = [value] if isinstance(value, str) else value
        if not isinstance(strings, list) or len(strings) > self.max_items:
            refuse(name, value, self.allowed)
        for string in strings:
            if not isinstance(string, str) or not 1 <= len(string.encode()) <= self.max_bytes:
                refuse(name, string, self.allowed)
        return tuple(strings)


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A list of token ids. They are checked against the vocabulary later, where the model is known."""

    max_items: int

    @property
    def allowed(self) -> str:
        return f"a list of up to {self.max_items} token ids"

    def read(self, name: str, value: object) -> tuple[int, ...]:
        if not isinstance(value, list) or len(value) > self.max_items or not all(map(is_token_id, value)):
            refuse(name, value, self.allowed)
        return tuple(value)


@dataclass(frozen=True, slots=True)
class LogitBias:
    max_items: int
    bias: Number

    @property
    def allowed(self) -> str:
        return f"an object of up to {self.max_items} token ids, each with {self.bias.allowed}"

    def read(self, name: str, value: object) -> dict[int, float]:
        if not isinstance(value, dict) or len(value) > self.max_items:
            refuse(name, value, self.allowed)
        biases = {}
        for key, bias in value.items():
            # With leading zeros, two keys could name the same id.
            if not _TOKEN_ID.fullmatch(key):
                refuse(name, key, self.allowed)
            biases[int(key)] = self.bias.read(f"{name}.{key}", bias)
        return biases


@dataclass(frozen=True, slots=True)
class Metadata:
    max_items: int
    key: Text
    value: Text

    @property
    def allowed(self) -> str:
        sizes = f"of up to {self.key.max_bytes} to ones of up to {self.value.max_bytes} bytes"
        return f"an object of up to {self.max_items} pairs of strings, {sizes}"

    def read(self, name: str, value: object) -> dict[str, str]:
        if not isinstance(value, dict) or len(value) > self.max_items:
            refuse(name, value, self.allowed)
        return {self.key.read(name, k): self.value.read(f"{name}.{k[:64]}", v) for k, v in value.items()}


@dataclass(frozen=True, slots=True)
class Flags:
    """An object of booleans with a closed set of names."""

    names: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return "an object with the booleans " + ", ".join(f"`{name}`" for name in self.names)

    def read(self, name: str, value: object) -> dict[str, bool]:
        fields = closed_fields(name, value, self.names, self.allowed)
        return {key: key in fields and Boolean().read(f"{name}.{key}", fields[key]) for key in self.names}


@dataclass(frozen=True, slots=True)
class Refused:
    """A known name whose feature is not offered; values that do not request the feature are accepted."""

    reason: str
    harmless: tuple[object, ...] = ()

    @property
    def allowed(self) -> str:
        harmless = [str(value).lower() if isinstance(value, bool) else repr(value) for value in self.harmless]
        return " or ".join(["absent", *harmless])

    def read(self, name: str, value: object) -> None:
        if any(value == each and type(value) is type(each) for each in self.harmless):
            return
        raise UnsupportedParameter(
            f"`{name}` is not supported: {self.reason}. It must be {self.allowed}.", param=name
        )


def is_token_id(value: object) -> bool:
    """Whether `value` is a non-negative integer of at most 31 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


Prompt: TypeAlias = str | list[int]


@dataclass(frozen=True, slots=True)
class Prompts:
    """The type of `prompt`. Every form is read into a list of prompts, none of them empty."""

    max_items: int = 64

    @property
    def allowed(self) -> str:
        forms = "a string, a list of strings, a list of token ids or a list of such lists"
        return f"{forms}; 1..{self.max_items} prompts, none of them empty"

    def read(self, name: str, value: object) -> list[Prompt]:
        if isinstance(value, str) or _is_token_list(value):
            return [self._prompt(name, value)]
        if not isinstance(value, list) or not 1 <= len(value) <= self.max_items:
            refuse(name, value, self.allowed)
        if len({type(each) for each in value}) != 1:
            refuse(name, value, self.allowed)
        return [self._prompt(f"{name}[{index}]", each) for index, each in enumerate(value)]

    def _prompt(self, name: str, value: object) -> Prompt:
        if isinstance(value, str) and value:
            return value
        if _is_token_list(value):
            return value
        refuse(name, value, self.allowed)


def _is_token_list(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(map(is_token_id, value))
