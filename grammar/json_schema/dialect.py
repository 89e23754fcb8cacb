"""Rewrites older drafts of JSON Schema as 2020-12, so that all other modules know one dialect.

Invariant: the result means under 2020-12 what the schema means under the draft of its `$schema`. Where there is none,
older forms of single keywords are read too (`slips.py`).
"""

import re
from typing import Any, Final

from loraplex.grammar.constraints import JsonSchemaValue
from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.json_schema.references import References, Target
from loraplex.grammar.json_schema.slips import NULLABLE, read_bounds, read_required, read_slips
from loraplex.grammar.json_schema.walk import LISTS, MAPS, SINGLE, escaped, is_schema

NEWEST: Final = "https://json-schema.org/draft/2020-12/schema"
_UNSTATED: Final = 10
"""The newest draft, which the schema does not name: `$id` may have a fragment, as older drafts allow."""
# Dialect without its scheme -> the number by which drafts are compared.
DIALECTS: Final = {
    "json-schema.org/draft-04/schema": 4,
    "json-schema.org/draft-06/schema": 6,
    "json-schema.org/draft-07/schema": 7,
    "json-schema.org/draft/2019-09/schema": 8,
    "json-schema.org/draft/2020-12/schema": 9,
    "json-schema.org/schema": _UNSTATED,
}
# Validation keywords of older drafts that the validator does not support.
_FORGOTTEN: Final = ("disallow", "divisibleBy", "extends")
# Keywords that assert something -> the draft that introduced them; before it they had no meaning.
_SINCE: Final = {
    **dict.fromkeys(("const", "contains", "propertyNames"), 6),
    **dict.fromkeys(("if", "then", "else"), 7),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "maxContains", "minContains"), 8),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), 8),
    **dict.fromkeys(("$dynamicRef", "prefixItems"), 9),
}
_ANCHOR: Final = re.compile("[A-Za-z_][-A-Za-z0-9._]*")


def to_newest(schema: JsonSchemaValue, *, param: str, slips: set[str] | None = None) -> JsonSchemaValue:
    """Rewrite the schema. Raises `GrammarInvalid` for an unknown dialect or keyword.

    `slips` gets the names of the keywords that `slips.py` has read, and `nullable`.
    """
    if isinstance(schema, bool):
        return schema
    draft = _draft(schema, param)
    reached: frozenset[str] = frozenset()
    while True:
        rewriting = _Rewriting(draft, reached, param, reads_slips=schema.get("$schema") is None)
        newest: dict[str, Any] = rewriting.schema(schema, "", draft)
        outside = References(newest).outside()
        more = reached.union(place.pointer for place in outside)
        if more == reached:
            break
        reached = more
    for place in outside:
        rewriting.check_rewritten(place)
    if slips is not None:
        slips |= rewriting.slips
    return schema if newest == schema else newest


def _draft(schema: dict[str, Any], param: str) -> int:
    named = schema.get("$schema")
    draft = _UNSTATED if named is None else _dialect(named)
    if draft is None:
        raise GrammarInvalid(
            f"{param}: $schema must be one of {', '.join(DIALECTS)}", param=param, pointer="/$schema"
        )
    return draft


def _dialect(named: object) -> int | None:
    if not isinstance(named, str):
        return None
    scheme, _, rest = named.partition("#")[0].partition("://")
    return DIALECTS.get(rest) if scheme in ("http", "https") else None


class _Rewriting:
    """Rewrites subschemas, also those at `reached`: JSON Pointers to where only references expect subschemas."""

    def __init__(self, draft: int, reached: frozenset[str], param: str, *, reads_slips: bool) -> None:
        self.slips: set[str] = set()
        self._reads_slips = reads_slips
        self._draft = draft
        self._param = param
        self._reached = reached
        self._above = {place[:end] for place in reached for end, letter in enumerate(place) if letter == "/"}
        self._rewritten: set[str] = set()

    def check_rewritten(self, place: Target) -> None:
        """Raises `GrammarInvalid` for a target that cannot be rewritten, since it is also a value or a map."""
        if place.pointer in self._rewritten:
            return
        if self.schema(place.schema, place.pointer, self._draft) != place.schema:
            raise self._refused("an older draft's keywords cannot be referred to here", place.pointer)

    def schema(self, node: Any, pointer: str, draft: int) -> Any:
        """Rewrite a subschema, given the draft of the subschema around it. Raises `GrammarInvalid`."""
        if not isinstance(node, dict):
            return node
        draft = self._checked_draft(node, pointer, draft)
        reads_slips = draft == _UNSTATED and self._reads_slips
        if reads_slips and (lifted := read_required(node)) is not node:
            node = lifted
            self.slips.add("required")
        if draft <= 7 and "$ref" in node:
            # Up to draft 7 the siblings of a reference are ignored; definitions stay as possible targets.
            node = {key: node[key] for key in ("$schema", "$ref", "definitions", "$defs") if key in node}
        made = {
            keyword: self._value(keyword, value, f"{pointer}/{escaped(keyword)}", draft)
            for keyword, value in node.items()
        }
        if draft <= 8:
            _rewrite_older(made, draft)
        flags = read_bounds(made, pointer, self._param)
        self.slips |= flags if draft > 4 else set()
        if reads_slips:
            self.slips |= read_slips(made, pointer, self._param)
        if made.get(NULLABLE) is True:
            self.slips.add(NULLABLE)
        if isinstance(made.get("$schema"), str):
            made["$schema"] = NEWEST
        if isinstance(made.get("$id"), str):
            _rewrite_id(made, draft, is_root=not pointer)
        if isinstance(made.get("dependencies"), dict):
            _rewrite_dependencies(made)
        return made

    def _value(self, keyword: str, value: Any, pointer: str, draft: int) -> Any:
        if keyword in MAPS and isinstance(value, dict):
            return {
                name: self.schema(member, f"{pointer}/{escaped(name)}", draft)
                for name, member in value.items()
            }
        if keyword in LISTS and isinstance(value, list):
            return [self.schema(member, f"{pointer}/{index}", draft) for index, member in enumerate(value)]
        if keyword in SINGLE and is_schema(value):
            return self.schema(value, pointer, draft)
        return value if keyword in ("const", "enum") else self._outside(value, pointer, draft)

    def _outside(self, value: Any, pointer: str, draft: int) -> Any:
        """Rewrite only what is reached."""
        if pointer in self._reached:
            self._rewritten.add(pointer)
            return self.schema(value, pointer, draft)
        if pointer not in self._above:
            return value
        if isinstance(value, list):
            return [self._outside(member, f"{pointer}/{index}", draft) for index, member in enumerate(value)]
        return {
            name: self._outside(member, f"{pointer}/{escaped(name)}", draft) for name, member in value.items()
        }

    def _checked_draft(self, node: dict[str, Any], pointer: str, draft: int) -> int:
        """Return the draft of the subschema; only one with an identifier may name its own."""
        named = node.get("$schema")
        own = _dialect(named) if pointer else None
        if pointer and isinstance(named, str) and own is None:
            raise self._refused("$schema below the root is not known", f"{pointer}/$schema")
        if own is not None and ("$id" in node or "id" in node):
            draft = own
        for keyword in _FORGOTTEN:
            if keyword in node:
                raise self._refused(f"{keyword} belongs to a draft before 4", f"{pointer}/{keyword}")
        if node.get("$recursiveAnchor") is True:
            raise self._refused("$recursiveAnchor is not supported", f"{pointer}/$recursiveAnchor")
        if draft == 8 and "$recursiveRef" in node and (node["$recursiveRef"] != "#" or "$ref" in node):
            raise self._refused("$recursiveRef must be # and alone", f"{pointer}/$recursiveRef")
        return draft

    def _refused(self, reason: str, pointer: str) -> GrammarInvalid:
        return GrammarInvalid(f"{self._param}: {reason}", param=self._param, pointer=pointer)


def _rewrite_older(made: dict[str, Any], draft: int) -> None:
    """Rewrite the keywords of a draft before 2020-12 that mean something else there."""
    for keyword, since in _SINCE.items():
        if draft < since:
            made.pop(keyword, None)
    if draft == 4 and "id" in made:
        made["$id"] = made.pop("id")
    if isinstance(made.get("items"), list):
        made["prefixItems"] = made.pop("items")
        if "additionalItems" in made:
            made["items"] = made["additionalItems"]
    made.pop("additionalItems", None)
    if draft == 8 and "$recursiveRef" in made:
        made["$ref"] = made.pop("$recursiveRef")


def _rewrite_id(made: dict[str, Any], draft: int, *, is_root: bool) -> None:
    """Remove an identifier of a fragment only: an empty one names nothing, and up to draft 7 a name is an anchor.

    A JSON Pointer names nothing either, since references read it as a pointer. A root's URI may have a fragment, too.
    """
    uri, _, fragment = made["$id"].partition("#")
    if fragment and (draft in (8, 9) or (uri and not is_root)):
        return  # the metaschema refuses it
    if uri:
        made["$id"] = uri
    else:
        del made["$id"]
    if _ANCHOR.fullmatch(fragment):
        made.setdefault("$anchor", fragment)


def _rewrite_dependencies(made: dict[str, Any]) -> None:
    found = made.pop("dependencies")
    schemas = {name: value for name, value in found.items() if is_schema(value)}
    names = {name: value for name, value in found.items() if name not in schemas}
    for keyword, wanted in (("dependentRequired", names), ("dependentSchemas", schemas)):
        known = made.get(keyword, {})
        if wanted and isinstance(known, dict):
            made[keyword] = known | {
                name: _both(known[name], value) if name in known else value for name, value in wanted.items()
            }


def _both(first: Any, second: Any) -> Any:
    """Join two values of one name: lists of names or subschemas."""
    if isinstance(first, list) and isinstance(second, list):
        return first + [name for name in second if name not in first]
    return {"allOf": [first, second]}
