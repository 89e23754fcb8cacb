"""The table of JSON Schema's keywords: by which backend, and under which condition, each is enforced exactly.

Invariant: a condition speaks of a keyword as `rewrite.py` leaves it, and never asks a backend. The tests hold the
table against both backends. Exact: whatever the grammar lets through is valid; property order and spelling may be narrower.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, TypeAlias

from loraplex.grammar.json_schema.pattern import translate
from loraplex.grammar.json_schema.values import listed_values
from loraplex.grammar.spec import Backend

# Beyond, a double is not exact, and neither is a backend that reads bounds as doubles.
_LARGEST: Final = 2**53
# The automaton of a step has as many states as its coefficient.
_LARGEST_STEP: Final = 10_000
_SMALLEST: Final = 1e-9
_LONGEST_BESIDE: Final = 1_000
_ESCAPED: Final = frozenset("\b\t\n\f\r")


@dataclass(frozen=True, slots=True)
class Site:
    """One keyword in its subschema. `merged`: the backend must intersect this subschema with another one.

    `recursive`: the reference of this subschema can come back to it.
    """

    keyword: str
    schema: Mapping[str, Any]
    merged: bool
    recursive: bool

    @property
    def value(self) -> Any:
        return self.schema[self.keyword]

    @property
    def alone(self) -> bool:
        """Whether nothing else is asserted beside this keyword."""
        return all(other == self.keyword for other in self.schema if other != "$defs")


Condition: TypeAlias = Callable[[Site], bool]


@dataclass(frozen=True, slots=True)
class Keyword:
    """What a backend enforces of a keyword. `drops`: keywords whose meaning hangs on it, which fall with it."""

    llguidance: Condition
    xgrammar: Condition
    drops: tuple[str, ...] = ()

    def enforces(self, backend: Backend, site: Site) -> bool:
        """Whether the backend enforces the keyword exactly at this site."""
        return (self.llguidance if backend == "llguidance" else self.xgrammar)(site)


def always(site: Site) -> bool:
    return True


def never(site: Site) -> bool:
    return False


def alone(site: Site) -> bool:
    """xgrammar reads the first keyword of this kind that it meets and forgets the others."""
    return site.alone and not site.merged


def only_in(*types: str) -> Condition:
    """xgrammar reads a type's keywords where `type` names that one type."""

    def condition(site: Site) -> bool:
        return site.schema.get("type") in types and not site.merged and "$ref" not in site.schema

    return condition


def one_type(site: Site) -> bool:
    return isinstance(site.value, str) and not site.merged


def declared(site: Site) -> bool:
    """xgrammar forgets a required name that `properties` lacks."""
    properties = site.schema.get("properties", {})
    return closed_object(site) and all(name in properties for name in site.value)


def closed_object(site: Site) -> bool:
    """An object with declared properties and no others: xgrammar lets a declared name recur among the others."""
    return (
        only_in("object")(site)
        and site.schema.get("additionalProperties") is False
        and bool(site.schema.get("properties"))
        and not any(member is False for member in site.schema["properties"].values())
    )


def writable(site: Site) -> bool:
    """Values that can be written without `\\u`, their numbers exact as doubles."""
    return all(_is_writable(value) for value in listed_values({site.keyword: site.value}) or ())


def plain_values(site: Site) -> bool:
    """xgrammar writes a value in one compact spelling only; of these there is no other."""
    values = listed_values({site.keyword: site.value}) or ()
    return alone(site) and all(
        value.isprintable()
        if isinstance(value, str)
        else value is None or (isinstance(value, int) and is_exact(value))
        for value in values
    )


def whole_bound(site: Site) -> bool:
    """Of bounds xgrammar is proven on whole numbers."""
    return only_in("integer")(site) and isinstance(site.value, int) and is_exact(site.value)


def exact_bound(site: Site) -> bool:
    """Bounds are read as doubles and written out in decimal."""
    return is_exact(site.value)


def open_bound(site: Site) -> bool:
    """llguidance lets a whole number through as an excluded bound when both bounds have the same whole part."""
    if not is_exact(site.value):
        return False
    if site.schema.get("type") == "integer" or not float(site.value).is_integer():
        return True
    others = (
        ("maximum", "exclusiveMaximum")
        if site.keyword == "exclusiveMinimum"
        else ("minimum", "exclusiveMinimum")
    )
    return not site.merged and all(
        int(site.schema[other]) != int(site.value) for other in others if other in site.schema
    )


def decimal_step(site: Site) -> bool:
    """Steps are read as a coefficient of 32 bits and a power of ten; merging two may overflow."""
    return not site.merged and _is_step(site.value)


def translatable(site: Site) -> bool:
    """A pattern that has an exact Rust spelling."""
    return translate(site.value) is not None


def beside_pattern(site: Site) -> bool:
    """Whether two patterns have a text in common the backend finds out where they are not long and nothing bounds the text."""
    pattern = site.schema.get("pattern")
    if pattern is None:
        return True
    bounded = "minLength" in site.schema or "maxLength" in site.schema
    return (
        site.schema.get("type") == "string"
        and not (site.merged or bounded)
        and len(pattern) <= _LONGEST_BESIDE
    )


def apart(site: Site) -> bool:
    """Patterns of names that provably exclude each other; merged, they escape the other side's additionalProperties."""
    found = [translate(pattern) for pattern in site.value]
    # In order: between a prefix and what begins with it there is nothing that does not.
    prefixes = sorted(pattern.prefix for pattern in found if pattern is not None)
    if site.merged or len(prefixes) != len(site.value):
        return False
    return not any(second.startswith(first) for first, second in pairwise(prefixes))


def counts_what_is_free(site: Site) -> bool:
    """Where all declared names are required the others are counted; a name can recur among these, so at least one only."""
    schema = site.schema
    required = set(schema.get("required", ()))
    if site.merged or not required >= set(schema.get("properties", ())):
        return False
    if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
        return False
    return site.keyword == "maxProperties" or site.value <= len(required) + 1


def not_back_to_itself(site: Site) -> bool:
    """Merged with something else, a reference is expanded: one that comes back cannot be."""
    return not site.recursive or (site.alone and not site.merged)


def _is_step(value: Any) -> bool:
    """Whether the backend's way to a coefficient, times ten until nothing is left, ends where decimals would."""
    if abs(value) > _LARGEST_STEP:
        return False
    scaled, exponent = abs(float(value)), 0
    while not scaled.is_integer() and exponent < 9:
        scaled, exponent = scaled * 10.0, exponent + 1
    return (
        scaled.is_integer()
        and 0 < scaled <= _LARGEST_STEP
        and float(f"{int(scaled)}e-{exponent}") == abs(value)
    )


def is_exact(value: Any) -> bool:
    """Whether a number survives as a double and in plain decimals."""
    if isinstance(value, int):
        return abs(value) <= _LARGEST
    return bool(value == 0 or _SMALLEST <= abs(value) <= _LARGEST)


def _is_writable(value: Any) -> bool:
    if isinstance(value, str):
        return all(letter in _ESCAPED or " " <= letter != "\x7f" for letter in value)
    if isinstance(value, list):
        return all(map(_is_writable, value))
    if isinstance(value, dict):
        return all(map(_is_writable, value.values())) and all(map(_is_writable, value))
    return value is None or isinstance(value, bool) or is_exact(value)


KEYWORDS: Final[Mapping[str, Keyword]] = {
    # any type
    "type": Keyword(always, one_type),
    "const": Keyword(writable, plain_values),
    "enum": Keyword(writable, plain_values),
    # objects
    "properties": Keyword(always, closed_object),
    "patternProperties": Keyword(apart, never, drops=("additionalProperties",)),
    "additionalProperties": Keyword(always, closed_object),
    "required": Keyword(always, declared),
    "minProperties": Keyword(counts_what_is_free, closed_object),
    "maxProperties": Keyword(counts_what_is_free, closed_object),
    "propertyNames": Keyword(never, never),
    "dependentRequired": Keyword(never, never),
    "dependentSchemas": Keyword(never, never),
    "unevaluatedProperties": Keyword(never, never),
    # arrays
    "items": Keyword(always, only_in("array")),
    "prefixItems": Keyword(always, only_in("array")),
    "minItems": Keyword(always, only_in("array")),
    "maxItems": Keyword(always, only_in("array")),
    "uniqueItems": Keyword(never, never),
    "contains": Keyword(never, never, drops=("minContains", "maxContains")),
    "unevaluatedItems": Keyword(never, never),
    # strings
    "minLength": Keyword(always, never),
    "maxLength": Keyword(always, never),
    "pattern": Keyword(translatable, never),
    "format": Keyword(never, never),
    "$format": Keyword(beside_pattern, never),
    # numbers
    "minimum": Keyword(exact_bound, whole_bound),
    "maximum": Keyword(exact_bound, whole_bound),
    "exclusiveMinimum": Keyword(open_bound, never),
    "exclusiveMaximum": Keyword(open_bound, never),
    "multipleOf": Keyword(decimal_step, never),
    # in place
    "allOf": Keyword(always, never),
    "anyOf": Keyword(always, alone),
    "oneOf": Keyword(never, never),
    "not": Keyword(never, never),
    "if": Keyword(never, never, drops=("then", "else")),
    "$ref": Keyword(not_back_to_itself, alone),
    "$dynamicRef": Keyword(never, never),
}
"""Every keyword that asserts something. What is not here is an annotation, or says nothing by itself. `$format` is a format
that `schema/formats.py` has a pattern for, `format` any other that the validator knows.
"""
