"""Validates finished values where the grammar does not enforce all of a schema.

Invariant: it opens no connection. Neither its creation nor its use is bounded in time: servers use it in a worker process.
"""

import json
from decimal import Decimal
from json import JSONDecodeError
from typing import Any, Final

import jsonschema_rs

from loraplex.grammar.constraints import JsonSchemaValue
from loraplex.grammar.errors import (
    GrammarInvalid,
    JsonNumberRefused,
    JsonRefused,
    JsonTooDeep,
    NotANumber,
    RepeatedName,
    SchemaNotSatisfied,
)
from loraplex.grammar.json_schema.references import ROOT
from loraplex.grammar.json_schema.walk import escaped
from loraplex.grammar.strict_json import parse_json

_BACKTRACKING_STEPS: Final = 100_000
_PATTERN_BYTES: Final = 10 << 20
_LARGEST_EXPONENT: Final = 400
_LONGEST_NUMBER: Final = 4_000


class Validator:
    """Validates values against one schema of draft 2020-12; formats are asserted."""

    def __init__(self, schema: JsonSchemaValue, *, param: str | None = None) -> None:
        """Raises `GrammarInvalid` for an invalid schema or one that refers to another document."""
        try:
            self._validator = jsonschema_rs.Draft202012Validator(
                schema,
                validate_formats=True,
                offline=True,
                base_uri=ROOT,
                pattern_options=jsonschema_rs.FancyRegexOptions(
                    backtrack_limit=_BACKTRACKING_STEPS, size_limit=_PATTERN_BYTES
                ),
            )
        except jsonschema_rs.ValidationError as error:
            raise invalid_schema(error, param) from error
        except (ValueError, jsonschema_rs.ReferencingError) as error:
            raise GrammarInvalid(f"not a JSON schema: {str(error)[:200]}", param=param, pointer="") from error

    def validate(self, value_text: str) -> None:
        """Validate the whole output text. Raises `SchemaNotSatisfied` with the keyword and the place in the value."""
        value = parse_value(value_text)
        try:
            self._validator.validate(value)
        except jsonschema_rs.ValidationError as error:
            raise SchemaNotSatisfied(
                f"{error.kind.name} is not satisfied at {pointer_to(error.instance_path)!r}"
            ) from error
        except ValueError as error:
            raise SchemaNotSatisfied("the value cannot be validated") from error


def validate_text(schema: str, value: str) -> None:
    """Validate `value` against `schema`, both JSON texts. Raises `SchemaNotSatisfied` or `GrammarInvalid`."""
    Validator(json.loads(schema)).validate(value)


def parse_value(text: str) -> Any:
    """Parse one JSON value with exact numbers. Raises `SchemaNotSatisfied`, also for a repeated key in an object."""
    try:
        return parse_json(text, max_digits=_LONGEST_NUMBER, parse_float=_decimal)
    except RepeatedName as error:
        raise SchemaNotSatisfied("an object has a key twice") from error
    except JsonTooDeep as error:
        raise SchemaNotSatisfied("the value is nested too deeply") from error
    except NotANumber as error:
        raise SchemaNotSatisfied(f"{error.text} is not JSON") from error
    except JsonRefused as error:
        raise SchemaNotSatisfied(f"the value {error}") from error
    except JSONDecodeError as error:
        raise SchemaNotSatisfied("the value is not JSON") from error


def pointer_to(path: list[str | int]) -> str:
    """Return a JSON Pointer of at most 200 characters."""
    return "".join(f"/{escaped(str(part))}" for part in path)[:200]


def _decimal(text: str) -> Decimal:
    exponent = text.lower().partition("e")[2]
    # A larger exponent makes no Decimal, or one that exhausts the memory when compared.
    if len(text) > _LONGEST_NUMBER or len(exponent) > 8 or abs(int(exponent or 0)) > _LARGEST_EXPONENT:
        raise JsonNumberRefused(f"holds a number beyond 1e±{_LARGEST_EXPONENT} or of too many digits")
    return Decimal(text)


def invalid_schema(
    error: jsonschema_rs.ValidationError, param: str | None, above: str = ""
) -> GrammarInvalid:
    """Return the error with reason and place; its message quotes at most 200 characters of the schema.

    `above` is the JSON Pointer of the part that was validated.
    """
    pointer = above + pointer_to(error.instance_path)
    return GrammarInvalid(
        f"not a JSON schema at {pointer!r}: {error.message[:200]}", param=param, pointer=pointer
    )
