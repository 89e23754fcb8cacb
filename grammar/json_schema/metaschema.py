"""Checks that a schema is valid against the standard's metaschema.

Invariant: the time is proportional to the schema's size. Building a validator is not: with `unevaluatedProperties`,
eight definitions that refer to each other took seconds.
"""

from typing import Final

import jsonschema_rs

from loraplex.grammar.constraints import JsonSchemaValue
from loraplex.grammar.json_schema.dialect import NEWEST
from loraplex.grammar.json_schema.references import References, unresolved
from loraplex.grammar.json_schema.validator import invalid_schema

# A schema's content belongs to its tenant: errors name place and reason, never content.
_METASCHEMA: Final = jsonschema_rs.Draft202012Validator(
    {"$ref": NEWEST}, validate_formats=True, offline=True, mask="the value"
)


def check_is_schema(schema: JsonSchemaValue, *, param: str) -> None:
    """Raises `GrammarInvalid`, also for a pattern that is no regular expression. References are not followed."""
    try:
        _METASCHEMA.validate(schema)
    except jsonschema_rs.ValidationError as error:
        raise invalid_schema(error, param) from error


def check_stays_inside(references: References, *, param: str) -> None:
    """Raises `GrammarInvalid` for a reference to another document: none is ever fetched."""
    for pointer, reference in references.leading_out():
        raise unresolved(reference, pointer=pointer, param=param)
