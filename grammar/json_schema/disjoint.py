"""Proves that no value satisfies two subschemas at once, so that oneOf means anyOf.

Invariant: True is a proof; False proves nothing.
"""

from collections.abc import Sequence
from typing import Any, Final

from loraplex.grammar.json_schema.references import References, Target
from loraplex.grammar.json_schema.values import (
    allowed_types,
    counts_exclude,
    identity,
    listed_values,
    ranges_exclude,
)
from loraplex.grammar.json_schema.walk import escaped

_MAX_DEPTH: Final = 6
_MAX_STEPS: Final = 3_000
"""A step takes 15 to 30 µs; this many allow 77 options to be compared in pairs."""
_VALUES_PER_STEP: Final = 16


class Disjointness:
    """Compares subschemas of one schema within a number of steps; after that, nothing more is proven."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._steps = 0
        # Keyed by the subschema's address, which stays valid because the references keep all of them.
        self._listed: dict[int, set[Any] | None] = {}

    def all_disjoint(self, members: Sequence[Target]) -> bool:
        """Return whether every two members exclude each other."""
        if self._are_distinguished(members):
            return True
        return len(members) ** 2 <= 2 * _MAX_STEPS and all(
            self.disjoint(first, second, 0)
            for index, first in enumerate(members)
            for second in members[index + 1 :]
        )

    def disjoint(self, first: Target, second: Target, depth: int) -> bool:
        """Return whether no value satisfies both."""
        self._steps += 1
        if self._steps > _MAX_STEPS or depth > _MAX_DEPTH:
            return False
        for schema in (first.schema, second.schema):
            if schema is False:
                return True
        lefts, rights = self._conjuncts(first), self._conjuncts(second)
        if any(self._exclude(left, right, depth) for left in lefts for right in rights):
            return True
        return self._each_option(lefts, second, depth) or self._each_option(rights, first, depth)

    def _each_option(self, conjuncts: list[Target], other: Target, depth: int) -> bool:
        """Return whether some anyOf or oneOf has only options that exclude `other`."""
        for conjunct in conjuncts:
            for keyword in ("anyOf", "oneOf"):
                options = conjunct.schema.get(keyword)
                if isinstance(options, list) and all(
                    self.disjoint(
                        self._references.child(conjunct, f"/{keyword}/{index}", option), other, depth + 1
                    )
                    for index, option in enumerate(options)
                ):
                    return True
        return False

    def _conjuncts(self, place: Target) -> list[Target]:
        """Return the subschemas that apply together with `place`: itself, its reference's target, its allOf."""
        found: list[Target] = []
        waiting = [place]
        while waiting and len(found) < 16:
            here = waiting.pop()
            if not isinstance(here.schema, dict) or any(known.pointer == here.pointer for known in found):
                continue
            found.append(here)
            reference = here.schema.get("$ref")
            if isinstance(reference, str):
                target = self._references.resolve(reference, here.base)
                if target is not None:
                    waiting.append(target)
            members = here.schema.get("allOf")
            if isinstance(members, list):
                waiting += [
                    self._references.child(here, f"/allOf/{index}", member)
                    for index, member in enumerate(members)
                ]
        return found

    def _exclude(self, left: Target, right: Target, depth: int) -> bool:
        """Compare the two subschemas' own keywords, without references."""
        first, second = left.schema, right.schema
        shared = allowed_types(first) & allowed_types(second)
        if self._values_exclude(first, second, shared):
            return True
        return all(
            (kind == "number" and (ranges_exclude(first, second) or _kinds_of_number_exclude(first, second)))
            or (kind == "string" and counts_exclude(first, second, "Length"))
            or (kind == "array" and counts_exclude(first, second, "Items"))
            or (kind == "object" and self._objects_exclude(left, right, depth))
            for kind in shared
        )

    def _values_exclude(self, first: dict[str, Any], second: dict[str, Any], shared: frozenset[str]) -> bool:
        """Compare lists of values: they share none, or none of a type that both allow."""
        left, right = (
            None if values is None else {each for each in values if each[0] in shared}
            for values in (self._identities(first), self._identities(second))
        )
        if left is not None and right is not None:
            return not left & right
        return any(values is not None and not values for values in (left, right))

    def _objects_exclude(self, left: Target, right: Target, depth: int) -> bool:
        required = [
            name
            for place in (left, right)
            for name in place.schema.get("required", ())
            if isinstance(name, str)
        ]
        for name in required[:32]:
            first, second = self._property(left, name), self._property(right, name)
            if first is not None and second is not None and self.disjoint(first, second, depth + 1):
                return True
            if any(found is not None and found.schema is False for found in (first, second)):
                return True
        return False

    def _property(self, place: Target, name: str) -> Target | None:
        """Return the subschema of the property, None if nothing is known."""
        properties = place.schema.get("properties", {})
        if name in properties:
            return self._references.child(place, f"/properties/{escaped(name)}", properties[name])
        if place.schema.get("patternProperties"):
            return None
        if "additionalProperties" in place.schema:
            return self._references.child(
                place, "/additionalProperties", place.schema["additionalProperties"]
            )
        return None

    def _are_distinguished(self, members: Sequence[Target]) -> bool:
        """Compare many options without pairs: by their own values, or by values of one shared required property."""
        if len(members) < 8:
            return False
        tags: dict[str | None, list[set[Any]]] = {}
        for place in members:
            for name, values in self._tags(place).items():
                tags.setdefault(name, []).append(values)
        return any(
            len(found) == len(members) and sum(map(len, found)) == len(set[Any]().union(*found))
            for found in tags.values()
        )

    def _tags(self, place: Target) -> dict[str | None, set[Any]]:
        """Return the allowed values of each required property of a member that is an object; its own under None."""
        found: dict[str | None, set[Any]] = {}
        for conjunct in self._conjuncts(place):
            schema = conjunct.schema
            if (own := self._identities(schema)) is not None:
                found[None] = own
            if allowed_types(schema) != {"object"}:
                continue
            for name in schema.get("required", ()):
                member = schema.get("properties", {}).get(name)
                values = self._identities(member) if isinstance(member, dict) else None
                if values is not None:
                    found[name] = values
        return found

    def _identities(self, schema: dict[str, Any]) -> set[Any] | None:
        """Return the values of `const` and `enum` in comparable form; None if there is neither."""
        if id(schema) not in self._listed:
            values = listed_values(schema)
            self._listed[id(schema)] = None if values is None else set(map(identity, values))
        found = self._listed[id(schema)]
        self._steps += len(found or ()) // _VALUES_PER_STEP
        return found


def _kinds_of_number_exclude(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whole numbers against a value that is not whole."""
    for schema, other in ((first, second), (second, first)):
        named = schema.get("type")
        values = listed_values(other)
        if named == "integer" and values and all(isinstance(v, float) and not v.is_integer() for v in values):
            return True
    return False
