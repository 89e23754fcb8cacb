"""Rewrites older drafts of JSON Schema as 2020-12, so that all other modules know one dialect.

Invariant: the result means under 2020-12 what the schema means under the draft of its `$schema`.
"""

from typing import Any, Final

from loraplex.grammar.constraints import JsonSchemaValue
from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.json_schema.walk import LISTS, MAPS, SINGLE, is_schema, walk

NEWEST: Final = "https://json-schema.org/draft/2020-12/schema"
# Dialect -> the number by which drafts are compared.
DIALECTS: Final = {
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "https://json-schema.org/draft/2019-09/schema": 8,
    NEWEST: 9,
}
# Validation keywords of older drafts that the validator does not support.
_FORGOTTEN: Final = ("disallow", "divisibleBy", "extends")


def to_newest(schema: JsonSchemaValue, *, param: str) -> JsonSchemaValue:
    """Rewrite the schema. Raises `GrammarInvalid` for an unknown dialect or keyword."""
    if isinstance(schema, bool):
        return schema
    draft = _draft(schema, param)
    nodes = list(walk(schema))
    for pointer, node in nodes:
        if isinstance(node, dict):
            _refuse_unknown(node, pointer, param)
    if draft == 9 and not any("dependencies" in node for _, node in nodes if isinstance(node, dict)):
        return schema
    rewritten: dict[str, Any] = _rewrite(schema, draft)
    if "$schema" in rewritten:
        rewritten["$schema"] = NEWEST
    return rewritten


def _draft(schema: dict[str, Any], param: str) -> int:
    named = schema.get("$schema", NEWEST)
    draft = DIALECTS.get(named.removesuffix("#")) if isinstance(named, str) else None
    if draft is None:
        raise GrammarInvalid(
            f"{param}: $schema must be one of {', '.join(DIALECTS)}", param=param, pointer="/$schema"
        )
    return draft


def _refuse_unknown(node: dict[str, Any], pointer: str, param: str) -> None:
    for keyword in _FORGOTTEN:
        if keyword in node:
            raise GrammarInvalid(
                f"{param}: {keyword} belongs to a draft before 4", param=param, pointer=f"{pointer}/{keyword}"
            )
    if node.get("$recursiveAnchor") is True:
        raise GrammarInvalid(
            f"{param}: $recursiveAnchor is not supported", param=param, pointer=f"{pointer}/$recursiveAnchor"
        )
    nested = node.get("$schema")
    if pointer and isinstance(nested, str) and nested.removesuffix("#") not in DIALECTS:
        raise GrammarInvalid(
            f"{param}: $schema below the root is not known", param=param, pointer=f"{pointer}/$schema"
        )


def _rewrite(node: Any, draft: int) -> Any:
    if not isinstance(node, dict):
        return node
    if draft <= 7 and "$ref" in node:
        # Up to draft 7 the siblings of a reference are ignored; definitions stay as possible targets.
        node = {key: node[key] for key in ("$schema", "$ref", "definitions", "$defs") if key in node}
    made = {keyword: _rewrite_value(keyword, value, draft) for keyword, value in node.items()}
    if draft <= 6:
        for keyword in ("if", "then", "else"):
            made.pop(keyword, None)
    if draft == 4:
        _rewrite_draft_4(made)
    if isinstance(made.get("items"), list):
        made["prefixItems"] = made.pop("items")
        if "additionalItems" in made:
            made["items"] = made["additionalItems"]
    made.pop("additionalItems", None)
    if draft == 8 and made.get("$recursiveRef") == "#":
        made["$ref"] = made.pop("$recursiveRef")
    if isinstance(made.get("dependencies"), dict):
        _rewrite_dependencies(made)
    return made


def _rewrite_value(keyword: str, value: Any, draft: int) -> Any:
    if keyword in MAPS and isinstance(value, dict):
        return {name: _rewrite(member, draft) for name, member in value.items()}
    if keyword in LISTS and isinstance(value, list):
        return [_rewrite(member, draft) for member in value]
    return _rewrite(value, draft) if keyword in SINGLE and is_schema(value) else value


def _rewrite_draft_4(made: dict[str, Any]) -> None:
    for flag, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if made.get(flag) is True and bound in made:
            made[flag] = made.pop(bound)
        elif isinstance(made.get(flag), bool):
            del made[flag]
    if "id" in made:
        made["$id"] = made.pop("id")


def _rewrite_dependencies(made: dict[str, Any]) -> None:
    found = made.pop("dependencies")
    names = {key: value for key, value in found.items() if isinstance(value, list)}
    schemas = {key: value for key, value in found.items() if is_schema(value)}
    if names:
        made["dependentRequired"] = {**made.get("dependentRequired", {}), **names}
    if schemas:
        made["dependentSchemas"] = {**made.get("dependentSchemas", {}), **schemas}
