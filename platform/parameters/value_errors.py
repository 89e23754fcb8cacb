"""Errors of request parameters: the types that validators raise inside pydantic, and the texts that a client reads.

Invariant: no text quotes more than a few characters of a value, and none what may be content of a tenant.
"""

import json
import re
from dataclasses import dataclass
from typing import Final

from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from loraplex.platform.errors import InvalidParameter

MAX_EXCERPT: Final = 60
CONTENT: Final = frozenset(
    {
        *("messages", "prompt", "content", "text", "arguments", "stop", "user", "metadata", "cache_salt"),
        *("system", "thinking", "signature", "input", "input_schema", "user_id", "stop_sequences"),
        *("tools", "parameters", "schema", "description", "name"),
        *("regex", "choice", "grammar", "json", "structural_tag"),
        *("instructions", "value", "label", "output", "data"),
    }
)
"""Parameters whose values are a tenant's content: error messages do not quote them."""
REFUSED: Final = "refused"
"""A value that is not allowed: the message is the text of the allowed values, and `given` of the context the value at fault."""
REFUSED_KEY: Final = "refused_key"
"""A key of an object that is not allowed."""
INVALID: Final = "invalid"
"""Another error: the message follows the parameter's name."""
UNSUPPORTED: Final = "unsupported"
"""A feature that is not offered: the message follows the parameter's name."""
_INDEX: Final = re.compile(r"\[\d+\]")


def excerpt_of(value: object) -> str:
    """Describe a JSON value for an error message, with at most `MAX_EXCERPT` characters."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = json.dumps(value[:MAX_EXCERPT] if isinstance(value, str) else value, ensure_ascii=False)
    return text if len(text) <= MAX_EXCERPT else f"{text[:MAX_EXCERPT]}…"


def invalid_value(name: str, value: object, allowed: str) -> InvalidParameter:
    """Build the error of one value. Possible content of a tenant is not quoted, only its type and length."""
    last = _INDEX.sub("", name).rpartition(".")[2]
    given_value = (
        f"a string of {len(value)}" if isinstance(value, str) and last in CONTENT else excerpt_of(value)
    )
    error = InvalidParameter(f"`{name}` is {given_value}, but must be {allowed}.", param=name)
    error.allowed = allowed
    return error


@dataclass(frozen=True, slots=True, repr=False)
class Given:
    """The value at fault. pydantic writes all that an error contains as text, which takes long for a large value."""

    value: object


def refused(allowed: str, value: object) -> PydanticCustomError:
    """Build the error that a validator raises for `value`, which may be a part of its input."""
    return PydanticCustomError(REFUSED, allowed, {"given": Given(value)})


def checked(schema: CoreSchema, allowed: str, error: str = REFUSED) -> CoreSchema:
    """Replace the errors of `schema` by one with the text of the allowed values."""
    return core_schema.custom_error_schema(schema, custom_error_type=error, custom_error_message=allowed)
