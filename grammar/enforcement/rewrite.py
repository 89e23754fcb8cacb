"""Rewrites keywords to equivalent ones that backends enforce: a format to a pattern, an exclusive oneOf to anyOf.

Invariant: the same documents are valid before and after (formats: as `json_schema/formats.py` defines them).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from loraplex.grammar.enforcement.keywords import KEYWORDS
from loraplex.grammar.json_schema.bounds import COUNTS
from loraplex.grammar.json_schema.disjoint import Disjointness
from loraplex.grammar.json_schema.formats import VALIDATED_FORMATS, format_pattern
from loraplex.grammar.json_schema.pattern import translate
from loraplex.grammar.json_schema.references import References, Target
from loraplex.grammar.json_schema.values import TYPES, allowed_types, listed_values

_APPLICATORS: Final = frozenset(
    ("$dynamicRef", "$ref", "allOf", "anyOf", "contains", "dependentSchemas", "if", "not", "oneOf")
)
# (new name, the keyword it came from); used where the subschema has no keyword of the new name.
_ORIGINS: Final = (
    ("additionalProperties", "unevaluatedProperties"),
    ("items", "unevaluatedItems"),
    ("anyOf", "oneOf"),
    ("allOf", "oneOf"),
    ("$format", "format"),
    ("properties", "additionalProperties"),
    ("patternProperties", "additionalProperties"),
)


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The asserting keywords of one subschema. `origin` maps a keyword to its name in the request, where that
    differs.
    """

    keywords: dict[str, Any]
    origin: dict[str, str]

    def place_of(self, keyword: str) -> str:
        """Return the keyword's name in a pointer into the request's schema."""
        return self.origin.get(keyword, keyword)


class Rewriter:
    """Rewrites one subschema at a time, its own keywords only, and each once."""

    def __init__(self, references: References) -> None:
        self.references = references
        self._disjointness = Disjointness(references)
        self._rewritten: dict[str, Rewritten] = {}

    def rewrite(self, place: Target) -> Rewritten:
        """Rewrite the subschema, which must be an object.

        `format` stays where no pattern expresses it; otherwise its pattern is `$format`.
        """
        found = self._rewritten.get(place.pointer)
        return self._rewritten.setdefault(place.pointer, self._rewrite(place)) if found is None else found

    def _rewrite(self, place: Target) -> Rewritten:
        made = {keyword: value for keyword, value in place.schema.items() if _asserts(keyword, place.schema)}
        for keyword in COUNTS:
            if isinstance(made.get(keyword), float):
                made[keyword] = int(made[keyword])
        _rewrite_format(made)
        _rewrite_unevaluated(made)
        _rewrite_arrays(made)
        _rewrite_objects(made, self._names_of(place), place.schema)
        _rewrite_not(made)
        self._rewrite_one_of(made, place)
        return Rewritten(made, {new: old for new, old in _ORIGINS if new in made and new not in place.schema})

    def _names_of(self, place: Target) -> Any:
        """Return the value of `propertyNames`, with a lone reference resolved."""
        names = place.schema.get("propertyNames", True)
        reference = names.get("$ref") if isinstance(names, dict) and len(names) == 1 else None
        if reference is None:
            return names
        found = self.references.resolve(reference, self.references.child(place, "/propertyNames", names).base)
        return names if found is None else found.schema

    def _rewrite_one_of(self, made: dict[str, Any], place: Target) -> None:
        options = made.get("oneOf")
        if options is None or ("anyOf" in made and len(options) > 1):
            return
        members = [
            self.references.child(place, f"/oneOf/{index}", option) for index, option in enumerate(options)
        ]
        if len(options) == 1 or self._disjointness.all_disjoint(members):
            # A second anyOf would need an allOf of both; a single option needs neither.
            place_of = "allOf" if len(options) == 1 and "allOf" not in made else "anyOf"
            if place_of not in made:
                _rename(made, "oneOf", place_of)


def _asserts(keyword: str, schema: dict[str, Any]) -> bool:
    if keyword in ("then", "else", "minContains", "maxContains"):
        return ("if" if keyword in ("then", "else") else "contains") in schema
    if keyword == "format":
        return format_pattern(schema[keyword]) is not None or schema[keyword] in VALIDATED_FORMATS
    # `$format` is a name of this module, and means nothing in a request.
    return keyword in KEYWORDS and keyword != "$format"


def _rename(made: dict[str, Any], old: str, new: str) -> None:
    """Rename a keyword in its place, since the order of keywords is the order of properties."""
    for keyword, value in list(made.items()):
        del made[keyword]
        made[new if keyword == old else keyword] = value


def _rewrite_format(made: dict[str, Any]) -> None:
    pattern = format_pattern(made["format"]) if "format" in made else None
    if pattern is None:
        return
    del made["format"]
    # The pattern is in the backend's own syntax already.
    made["$format"] = pattern


def _rewrite_unevaluated(made: dict[str, Any]) -> None:
    """Treat unevaluated as additional where no other applicator evaluates."""
    if _APPLICATORS & made.keys():
        return
    if "unevaluatedProperties" in made:
        rest = made.pop("unevaluatedProperties")
        made.setdefault("additionalProperties", rest)
    if "unevaluatedItems" in made:
        rest = made.pop("unevaluatedItems")
        made.setdefault("items", rest)


def _rewrite_arrays(made: dict[str, Any]) -> None:
    if made.get("uniqueItems") is False or made.get("maxItems", 2) <= 1:
        made.pop("uniqueItems", None)
    least = made.get("minContains", 1)
    if "contains" in made and "maxContains" not in made:
        if least == 0:
            del made["contains"]
            made.pop("minContains", None)
        elif made["contains"] is True or made["contains"] == {}:
            del made["contains"]
            made.pop("minContains", None)
            made["minItems"] = max(made.get("minItems", 0), least)


def _rewrite_objects(made: dict[str, Any], names: Any, asked: dict[str, Any]) -> None:
    if made.get("minProperties") == 0:
        del made["minProperties"]
    if made.get("dependentRequired") == {} or made.get("dependentSchemas") == {}:
        made.pop("dependentRequired", None)
    if "propertyNames" in made:
        _rewrite_names(made, names, asked)


def _rewrite_names(made: dict[str, Any], names: Any, asked: dict[str, Any]) -> None:
    """Rewrite `propertyNames`, resolved in `names`. A name is always a string, so its type needs no test."""
    if not isinstance(names, dict):
        del made["propertyNames"]
        if names is False:
            made.update(additionalProperties=False, properties={}, patternProperties={})
        return
    asserted = {keyword: value for keyword, value in names.items() if _asserts(keyword, names)}
    if "string" in allowed_types(asserted):
        asserted.pop("type", None)
    rest = made.get("additionalProperties", True)
    listed = listed_values(asserted) if len(asserted) == 1 else None
    if not asserted:
        del made["propertyNames"]
    elif any(keyword in asked for keyword in ("properties", "patternProperties", "unevaluatedProperties")):
        return
    elif listed is not None:
        _rename(made, "propertyNames", "properties")
        made["properties"] = {name: rest for name in listed if isinstance(name, str)}
        made["additionalProperties"] = False
    elif asserted.keys() == {"pattern"} and "required" not in made and translate(asserted["pattern"]):
        _rename(made, "propertyNames", "patternProperties")
        made["patternProperties"] = {asserted["pattern"]: rest}
        made["additionalProperties"] = False


def _rewrite_not(made: dict[str, Any]) -> None:
    if "not" not in made:
        return
    refused = made["not"]
    if refused is False:
        del made["not"]
    elif refused is True or refused == {}:
        del made["not"]
        made["enum"] = []
    elif isinstance(refused, dict) and refused.keys() == {"type"}:
        names = refused["type"] if isinstance(refused["type"], list) else [refused["type"]]
        if "integer" in names and "number" not in names and "number" in allowed_types(made):
            return
        del made["not"]
        _forbid_types(made, names)


def _forbid_types(made: dict[str, Any], names: Sequence[str]) -> None:
    asked = made.get("type", sorted(TYPES))
    asked = [asked] if isinstance(asked, str) else asked
    forbidden = {*names, "integer"} if "number" in names else set(names)
    kept = [name for name in asked if name not in forbidden]
    made["type"] = kept
    if not kept:
        made["enum"] = []
