"""Resolves references inside one schema: `$id`, `$anchor` and JSON Pointers (RFC 3986, RFC 6901).

Invariants: nothing outside of the schema is read, and the standard's metaschemas are known by name only. Any JSON may
be indexed: no type of a value is assumed, since older drafts are rewritten before they are checked.
"""

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar
from urllib.parse import unquote, urljoin, urlsplit

from loraplex.grammar.constraints import JsonSchemaValue
from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.json_schema.walk import escaped, is_schema, subschemas

ROOT: Final = "http://schema.invalid/"
"""The base of a schema without `$id`. The domain exists nowhere (RFC 2606)."""

_KEYWORDS: Final = ("$ref", "$dynamicRef")
_LONGEST_INDEX: Final = 9

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Target:
    """A subschema. `pointer` is its place, `base` the URI that its own references are relative to."""

    pointer: str
    schema: Any
    base: str


@dataclass(frozen=True, slots=True)
class Followed:
    """A reference in the subschema `place`. `target` None: it leaves the schema or has no single target."""

    place: Target
    keyword: str
    reference: str
    target: Target | None


class References:
    """Resolves each reference of `schema`. A name that two subschemas have refers to neither (stored as None)."""

    def __init__(self, schema: JsonSchemaValue) -> None:
        self.root = schema
        self._places: dict[str, Target] = {}
        self._resources: dict[str, Target | None] = {}
        self._anchors: dict[tuple[str, str], Target | None] = {}
        self._dynamic: dict[str, list[Target]] = {}
        self._resolved: dict[tuple[str, str], Target | None] = {}
        self._index()

    def at_root(self) -> Target:
        return self._places[""]

    def resolve(self, reference: str, base: str) -> Target | None:
        """Return the target, None if the reference leaves the schema or has no single target."""
        key = (reference, base)
        if key not in self._resolved:
            self._resolved[key] = self._resolve(reference, base)
        return self._resolved[key]

    def _resolve(self, reference: str, base: str) -> Target | None:
        uri, fragment = _absolute(reference, base)
        resource = self._resources.get(uri)
        if resource is None or not fragment:
            return resource
        return self._at(resource, fragment) if fragment[0] == "/" else self._anchors.get((uri, fragment))

    @cached_property
    def followed(self) -> list[Followed]:
        """The references that the root leads to; a definition counts only where it is referred to."""
        found: list[Followed] = []
        seen: set[str] = set()
        dynamic = dict(self._dynamic)
        waiting = [self.at_root()]
        while waiting:
            place = waiting.pop()
            if place.pointer in seen or not isinstance(place.schema, dict):
                continue
            seen.add(place.pointer)
            for keyword in _KEYWORDS:
                reference = place.schema.get(keyword)
                if isinstance(reference, str):
                    target = self.resolve(reference, place.base)
                    found.append(Followed(place, keyword, reference, target))
                    waiting += [] if target is None else [target]
                    if keyword == "$dynamicRef":
                        waiting += dynamic.pop(reference.partition("#")[2], ())
            for suffix, member in subschemas(place.schema):
                if not suffix.startswith(("/$defs/", "/definitions/")):
                    waiting.append(self.child(place, suffix, member))
        return found

    def outside(self) -> list[Target]:
        """Return the targets that are no value of a keyword for schemas; their `$id` and anchors name nothing."""
        targets = (each.target for each in self.followed)
        found = {each.pointer: each for each in targets if each is not None}
        return [each for pointer, each in found.items() if pointer not in self._places]

    def leading_out(self) -> Iterator[tuple[str, str]]:
        """Yield the references to documents other than the standard's, each with its place, also in definitions."""
        for place in self._places.values():
            reference = place.schema.get("$ref") if isinstance(place.schema, dict) else None
            if (
                isinstance(reference, str)
                and _absolute(reference, place.base)[0] not in self._resources
                and not is_metaschema(reference)
            ):
                yield f"{place.pointer}/$ref", reference

    def child(self, parent: Target, suffix: str, schema: Any) -> Target:
        """Return the subschema at `suffix` below `parent`; a rewritten one gets the base of `parent`."""
        pointer = parent.pointer + suffix
        found = self._places.get(pointer)
        return found if found is not None and found.schema is schema else Target(pointer, schema, parent.base)

    def _index(self) -> None:
        stack = [Target("", self.root, ROOT)]
        while stack:
            place = self._entered(stack.pop())
            self._places[place.pointer] = place
            for suffix, member in subschemas(place.schema):
                stack.append(Target(place.pointer + suffix, member, place.base))

    def _entered(self, place: Target) -> Target:
        """Return the place with the base of its own `$id`, after indexing its names."""
        node = place.schema
        if not isinstance(node, dict):
            return place
        if isinstance(node.get("$id"), str):
            base = _absolute(node["$id"], place.base)[0]
            if base != place.base:
                place = Target(place.pointer, node, base)
                _name(self._resources, base, place)
        if not place.pointer:
            self._resources.setdefault(place.base, place)
            self._resources.setdefault(ROOT, place)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := node.get(keyword), str):
                _name(self._anchors, (place.base, anchor), place)
        if isinstance(anchor := node.get("$dynamicAnchor"), str):
            self._dynamic.setdefault(anchor, []).append(place)
        return place

    def _at(self, resource: Target, fragment: str) -> Target | None:
        try:
            parts = unquote(fragment, errors="strict").split("/")[1:]
        except UnicodeDecodeError:
            return None
        value: Any = resource.schema
        base = resource.base
        pointer = resource.pointer
        for part in parts:
            key: str | int | None = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list):
                key = _index(part, len(value))
            elif not isinstance(value, dict) or key not in value:
                key = None
            if key is None:
                return None
            value = value[key]
            pointer = f"{pointer}/{escaped(str(key))}"
            if (known := self._places.get(pointer)) is not None:
                base = known.base
        return Target(pointer, value, base) if is_schema(value) else None


def _name(names: MutableMapping[Key, Target | None], name: Key, place: Target) -> None:
    names[name] = place if names.get(name, place) is place else None


def _index(part: str, length: int) -> int | None:
    """Return the index that a reference token names in a list of `length`."""
    # `isdigit` alone accepts digits that `int` does not read.
    if not (part.isascii() and part.isdigit() and len(part) <= _LONGEST_INDEX):
        return None
    return int(part) if int(part) < length else None


def _absolute(reference: str, base: str) -> tuple[str, str]:
    """Return the URI of the referenced document and the fragment."""
    # A base has no fragment. `urljoin` is slow, and wrong where the base is a URN.
    if reference.startswith("#"):
        return base, reference[1:]
    document, _, fragment = reference.partition("#")
    try:
        # `urljoin` drops empty parts, which the validator keeps.
        is_kept = urlsplit(document).geturl() == document
        return urljoin(base, document) if is_kept else document, fragment
    except ValueError:
        return document, fragment


def is_metaschema(reference: str) -> bool:
    """Return whether the reference names a document of the standard, some of which the validator contains."""
    return reference.startswith(("http://json-schema.org/", "https://json-schema.org/"))


def unresolved(reference: str, *, pointer: str, param: str) -> GrammarInvalid:
    """Return the error for a reference without a target; only its first 200 characters are quoted."""
    return GrammarInvalid(
        f"{param}: {reference[:200]!r} refers to no single subschema here, and nothing outside is fetched",
        param=param,
        pointer=pointer,
    )
