"""Checks that a schema is valid against the standard's metaschema and that each of its references has a target.

Invariant: the time is proportional to the schema's size. Building a validator is not: with `unevaluatedProperties`,
eight definitions that refer to each other took seconds.
"""

from typing import Any, Final

import jsonschema_rs

from loraplex.grammar.constraints import JsonSchemaValue
from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.json_schema.dialect import NEWEST
from loraplex.grammar.json_schema.references import (
    ROOT,
    Followed,
    References,
    is_metaschema,
    unresolved,
)
from loraplex.grammar.json_schema.validator import invalid_schema

# `walk.py` visits `additionalItems` in every draft, so it is checked in every draft.
_SCHEMA: Final[dict[str, Any]] = {
    "$dynamicAnchor": "meta",
    "$ref": NEWEST,
    "properties": {"additionalItems": {"$dynamicRef": "#meta"}},
}
# A schema's content belongs to its tenant: errors name place and reason, never content.
_METASCHEMA: Final = jsonschema_rs.Draft202012Validator(
    _SCHEMA, validate_formats=True, offline=True, mask="the value"
)


def check_is_schema(schema: JsonSchemaValue, *, param: str, pointer: str = "") -> None:
    """Check the schema at `pointer`. Raises `GrammarInvalid`, also for a pattern that is no regular expression.

    References are not followed.
    """
    try:
        _METASCHEMA.validate(schema)
    except jsonschema_rs.ValidationError as error:
        raise invalid_schema(error, param, pointer) from error


def check_references(references: References, *, param: str) -> None:
    """Check all references of valid subschemas. Raises `GrammarInvalid` where one has no single target.

    None to another document is ever fetched. The validator's own registry is built too, since it rejects some names.
    """
    for pointer, reference in references.leading_out():
        raise unresolved(reference, pointer=pointer, param=param)
    without_target = [each for each in references.followed if each.target is None]
    for each in without_target:
        if each.keyword != "$ref" or not is_metaschema(each.reference):
            raise _unresolved(each, param)
    try:
        registry = jsonschema_rs.Registry([(ROOT, references.root)], draft=jsonschema_rs.Draft202012)
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        reason = f"{param}: an identifier or reference is not usable: {str(error)[:200]}"
        raise GrammarInvalid(reason, param=param, pointer="") from error
    for each in without_target:
        try:
            registry.resolver(each.place.base).lookup(each.reference)
        except (ValueError, jsonschema_rs.ReferencingError) as error:
            raise _unresolved(each, param) from error


def _unresolved(followed: Followed, param: str) -> GrammarInvalid:
    pointer = f"{followed.place.pointer}/{followed.keyword}"
    return unresolved(followed.reference, pointer=pointer, param=param)
