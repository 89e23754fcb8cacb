"""Resolves references inside one schema: `$id`, `$anchor` and JSON Pointers (RFC 3986, RFC 6901).

Invariant: nothing outside of the schema is read. The standard's metaschemas are known by name only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from loraplex.grammar.constraints import JsonSchemaValue
from loraplex.grammar.errors import GrammarInvalid
from loraplex.grammar.json_schema.walk import is_schema, subschemas

_ROOT = "json-schema://root/"


@dataclass(frozen=True, slots=True)
class Target:
    """A subschema. `pointer` is its place, `base` the URI that its own references are relative to."""

    pointer: str
    schema: Any
    base: str


class References:
    """Resolves each `$ref` of `schema`."""

    def __init__(self, schema: JsonSchemaValue) -> None:
        self.root = schema
        self._places: dict[str, Target] = {}
        self._resources: dict[str, Target] = {}
        self._anchors: dict[tuple[str, str], Target] = {}
        self._resolved: dict[tuple[str, str], Target | None] = {}
        self._index()

    def at_root(self) -> Target:
        return self._places[""]

    def resolve(self, reference: str, base: str) -> Target | None:
        """Return the target, None if the reference leaves the schema or has no target."""
        key = (reference, base)
        if key not in self._resolved:
            self._resolved[key] = self._resolve(reference, base)
        return self._resolved[key]

    def _resolve(self, reference: str, base: str) -> Target | None:
        uri, fragment = _absolute(reference, base)
        resource = self._resources.get(uri)
        if resource is None:
            return None
        fragment = unquote(fragment)
        if not fragment:
            return resource
        if fragment.startswith("/"):
            return self._at(resource, fragment)
        return self._anchors.get((uri, fragment))

    def leading_out(self) -> Iterator[tuple[str, str]]:
        """Yield the references to documents other than the standard's, each with its place."""
        for place in self._places.values():
            reference = place.schema.get("$ref") if isinstance(place.schema, dict) else None
            if (
                isinstance(reference, str)
                and _absolute(reference, place.base)[0] not in self._resources
                and not is_metaschema(reference)
            ):
                yield place.pointer, reference

    def child(self, parent: Target, suffix: str, schema: Any) -> Target:
        """Return the subschema at `suffix` below `parent`; a rewritten one gets the base of `parent`."""
        pointer = parent.pointer + suffix
        found = self._places.get(pointer)
        return found if found is not None and found.schema is schema else Target(pointer, schema, parent.base)

    def _index(self) -> None:
        stack = [Target("", self.root, _ROOT)]
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
            base = urldefrag(urljoin(place.base, node["$id"])).url
            place = Target(place.pointer, node, base)
            self._resources.setdefault(base, place)
        if not place.pointer:
            self._resources.setdefault(place.base, place)
            self._resources.setdefault(_ROOT, place)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(node.get(keyword), str):
                self._anchors.setdefault((place.base, node[keyword]), place)
        return place

    def _at(self, resource: Target, fragment: str) -> Target | None:
        value: Any = resource.schema
        base = resource.base
        pointer = resource.pointer
        for part in fragment[1:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
                value = value[int(key)]
            else:
                return None
            pointer = f"{pointer}/{part}"
            if (known := self._places.get(pointer)) is not None:
                base = known.base
        return Target(pointer, value, base) if is_schema(value) else None


def _absolute(reference: str, base: str) -> tuple[str, str]:
    """Return the URI of the referenced document and the fragment."""
    # A base has no fragment. `urljoin` is slow, and wrong where the base is a URN.
    if reference.startswith("#"):
        return base, reference[1:]
    uri, fragment = urldefrag(urljoin(base, reference))
    return uri, fragment


def is_metaschema(reference: str) -> bool:
    """Return whether the reference names a document of the standard, which the validator contains."""
    return reference.startswith(("http://json-schema.org/", "https://json-schema.org/"))


def unresolved(reference: str, *, pointer: str, param: str) -> GrammarInvalid:
    """Return the error for a reference without a target; only its first 200 characters are quoted."""
    return GrammarInvalid(
        f"{param}: {reference[:200]!r} refers to nothing in this schema, and nothing outside of it is fetched",
        param=param,
        pointer=f"{pointer}/$ref",
    )
