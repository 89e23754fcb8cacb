"""The support table of JSON Schema keywords: which backend enforces each exactly, and under which condition.

Invariant: exact means that every text the grammar accepts is valid; property order and spelling may be narrower.
Conditions see keywords as `rewrite.py` leaves them and never run a backend; tests compare the table with both.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, TypeAlias

from loraplex.grammar.json_schema.pattern import translate
from loraplex.grammar.json_schema.values import listed_values
from loraplex.grammar.spec import Backend

# Larger integers are not exact as doubles, and backends read bounds as doubles.
_LARGEST: Final = 2**53
# The automaton of a step has as many states as its coefficient.
_LARGEST_STEP: Final = 10_000
_SMALLEST: Final = 1e-9
_LONGEST_BESIDE: Final = 1_000


@dataclass(frozen=True, slots=True)
class Site:
    """One keyword in its subschema. `merged`: the backend must intersect this subschema with another one.

    `recursive`: the reference of this subschema can lead back to it.
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
        """Whether the subschema has no other asserting keyword."""
        return all(other == self.keyword for other in self.schema if other != "$defs")


Condition: TypeAlias = Callable[[Site], bool]


@dataclass(frozen=True, slots=True)
class Keyword:
    """When each backend enforces a keyword. `drops`: keywords that depend on it and are dropped with it."""

    llguidance: Condition
    xgrammar: Condition
    drops: tuple[str, ...] = ()

    def enforces(self, backend: Backend, site: Site) -> bool:
        """Return whether the backend enforces the keyword exactly at this site."""
        return (self.llguidance if backend == "llguidance" else self.xgrammar)(site)


def always(site: Site) -> bool:
    return True


def never(site: Site) -> bool:
    return False


def alone(site: Site) -> bool:
    """For xgrammar, which reads the first keyword of this kind and ignores the others."""
    return site.alone and not site.merged


def only_in(*types: str) -> Condition:
    """For xgrammar, which reads a type's keywords only where `type` names that one type."""

    def condition(site: Site) -> bool:
        return site.schema.get("type") in types and not site.merged and "$ref" not in site.schema

    return condition


def one_type(site: Site) -> bool:
    return isinstance(site.value, str) and not site.merged


def declared(site: Site) -> bool:
    """For xgrammar, which ignores a required name that `properties` lacks."""
    properties = site.schema.get("properties", {})
    return closed_object(site) and all(name in properties for name in site.value)


def closed_object(site: Site) -> bool:
    """An object with declared properties and no others; xgrammar allows a declared name again among the others."""
    return (
        only_in("object")(site)
        and site.schema.get("additionalProperties") is False
        and bool(site.schema.get("properties"))
        and not any(member is False for member in site.schema["properties"].values())
    )


def writable(site: Site) -> bool:
    """Values whose numbers are exact as doubles."""
    return all(map(is_writable, listed_values({site.keyword: site.value}) or ()))


def plain_values(site: Site) -> bool:
    """Values that have one compact spelling, the only one that xgrammar writes."""
    values = listed_values({site.keyword: site.value}) or ()
    return alone(site) and all(
        value is None or isinstance(value, str) or (isinstance(value, int) and is_exact(value))
        for value in values
    )


def whole_bound(site: Site) -> bool:
    """Whole-number bounds, the only ones for which xgrammar is proven exact."""
    return only_in("integer")(site) and isinstance(site.value, int) and is_exact(site.value)


def exact_bound(site: Site) -> bool:
    """Bounds that survive being read as doubles and written in decimal."""
    return is_exact(site.value)


def open_bound(site: Site) -> bool:
    """For llguidance, which accepts a whole number at an excluded bound when both bounds have the same whole part."""
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
    """Steps that fit a 32-bit coefficient and a power of ten; merging two may overflow."""
    return not site.merged and _is_step(site.value)


def translatable(site: Site) -> bool:
    """A pattern that has an exact Rust spelling."""
    return translate(site.value) is not None


def beside_pattern(site: Site) -> bool:
    """A format next to a pattern, where llguidance can decide whether one text satisfies both.

    It can where the pattern has at most `_LONGEST_BESIDE` characters and no length bound applies.
    """
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
    """Name patterns that provably exclude each other; merged ones escape the other subschema's additionalProperties."""
    found = [translate(pattern) for pattern in site.value]
    # Sorted, all texts with a prefix directly follow it, so comparing neighbours is enough.
    prefixes = sorted(pattern.prefix for pattern in found if pattern is not None)
    if site.merged or len(prefixes) != len(site.value):
        return False
    return not any(second.startswith(first) for first, second in pairwise(prefixes))


def counts_what_is_free(site: Site) -> bool:
    """For llguidance, which counts the undeclared names where all declared names are required.

    A name may recur among them, so `minProperties` may demand one undeclared name at most.
    """
    schema = site.schema
    required = set(schema.get("required", ()))
    if site.merged or not required >= set(schema.get("properties", ())):
        return False
    if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
        return False
    return site.keyword == "maxProperties" or site.value <= len(required) + 1


def not_back_to_itself(site: Site) -> bool:
    """Whether a reference can be expanded: merged with other keywords, a recursive one cannot."""
    return not site.recursive or (site.alone and not site.merged)


def _is_step(value: Any) -> bool:
    """Whether the backend's conversion, times ten until nothing is left, ends at the exact decimal."""
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
    """Return whether a number survives as a double and in plain decimals."""
    if isinstance(value, int):
        return abs(value) <= _LARGEST
    return bool(value == 0 or _SMALLEST <= abs(value) <= _LARGEST)


def is_writable(value: Any) -> bool:
    """Return whether each number of a value is exact in the backend that writes it."""
    if isinstance(value, list):
        return all(map(is_writable, value))
    if isinstance(value, dict):
        return all(map(is_writable, value.values()))
    return value is None or isinstance(value, bool | str) or is_exact(value)


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
"""Every keyword that asserts something; all others are annotations or have no meaning alone.

`$format` is a format with a pattern in `json_schema/formats.py`, `format` any other that the validator knows.
"""
