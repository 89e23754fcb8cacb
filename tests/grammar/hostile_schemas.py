"""Schemas of any shape: valid ones and their mutations, with wrong types at every keyword and references to everywhere."""

import json
from collections.abc import Iterator
from copy import deepcopy
from random import Random
from typing import Any, Final
from urllib.parse import quote

from tests.grammar.enforcement_table import groups
from tests.grammar.random_schemas import random_schema

from loraplex.grammar.check import Case
from loraplex.grammar.json_schema.walk import LISTS, MAPS, SINGLE, escaped, walk

DRAFTS: Final = (
    "http://json-schema.org/draft-04/schema#",
    "http://json-schema.org/draft-06/schema#",
    "http://json-schema.org/draft-07/schema#",
    "https://json-schema.org/draft/2019-09/schema",
    "https://json-schema.org/draft/2020-12/schema",
)
KEYWORDS: Final = (
    *sorted(SINGLE | LISTS | MAPS),
    *("$anchor", "$comment", "$dynamicAnchor", "$dynamicRef", "$id", "$recursiveAnchor", "$recursiveRef"),
    *("$ref", "$schema", "$vocabulary", "const", "contentEncoding", "contentMediaType", "default"),
    *("dependentRequired", "deprecated", "description", "disallow", "divisibleBy", "enum", "examples"),
    *("exclusiveMaximum", "exclusiveMinimum", "extends", "format", "id", "maxContains", "maxItems"),
    *("maxLength", "maxProperties", "maximum", "minContains", "minItems", "minLength", "minProperties"),
    *("minimum", "multipleOf", "pattern", "readOnly", "required", "title", "type", "uniqueItems"),
    *("x-own", "x-guidance", "$format"),
)
VALUES: Final[tuple[Any, ...]] = (
    *(
        None,
        True,
        False,
        0,
        1,
        5,
        -1,
        1.5,
        2.0,
        -0.0,
        1e300,
        10**30,
        2**63,
        "",
        "a",
        "^a",
        "(",
        "\\",
        "\u00b2",
    ),
    *("date", "object", "#", "#/", "http://[", "%zz", [], [5], ["a"], ["a", "a"], [[]], [{}], [None], [True]),
    *({}, {"a": 5}, {"a": {}}, {"a": []}, {"a": ["b"]}, {"": True}, {"type": 7}, {"properties": 5}),
    *({"required": "a"}, {"$ref": 3}, {"items": [{"type": "null"}]}, {"items": [5]}, {"(": {}}, {"a": None}),
)
"""Wrong types, and values that only some keywords allow."""
NAMES: Final = (
    "#n",
    "#",
    "",
    "n",
    "n#",
    "n#m",
    "/n",
    "http://e.test/n",
    "http://e.test/n#m",
    "#/a",
    "urn:u:1",
)
NAMES_OF_NOTHING: Final = ("mailto:x", "#a:b", "a b", ":", "//", "?", "http://[v1.a]/", "#%zz", "../..")
REFERENCES: Final = (
    *(*NAMES, *NAMES_OF_NOTHING, "#/$defs/none", "#none", "#/-", "#/allOf/00", "#/allOf/%C2%B2", "#/%FF"),
    *("https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#", "file:///x"),
    *(
        "https://json-schema.org/draft/2020-12/schema#/none",
        "http://schema.invalid/",
        "HTTP://SCHEMA.INVALID/",
    ),
)
DOCUMENTS: Final = ("null", "true", "3", "-1.5", '"a"', '"ab"', '""', "[]", "[1]", '["a",1]', "{}", '{"a":1}')
_KNOWN: Final = tuple(
    name for name in KEYWORDS if name not in ("disallow", "divisibleBy", "extends", "$schema")
)
_SUITE: Final = tuple(group.schema for group in groups() if isinstance(group.schema, dict))


def hostile_case(source: Random) -> Case:
    """A schema that was mutated up to six times, and documents that are not all invalid."""
    # A copy: parts of both are shared by all cases, and mutations change them.
    found = deepcopy(source.choice(_SUITE) if source.random() < 0.4 else random_schema(source))
    if source.random() < 0.5:
        found["$schema"] = _draft(source)
    for _ in range(source.choice((0, 1, 1, 1, 2, 2, 3, 6))):
        source.choice(_MUTATIONS)(source, found)
    values = [json.dumps(value) for _, value in _values(found) if not isinstance(value, dict)]
    written = source.sample(values, min(4, len(values)))
    return Case(found, (*source.sample(DOCUMENTS, 5), *written))


def wrong_types() -> Iterator[tuple[dict[str, Any], str]]:
    """Every keyword with every value, with the place of the subschema: the root, a property, a reference's target."""
    for keyword in KEYWORDS:
        for value in VALUES:
            node = {keyword: value}
            yield node, ""
            yield {"properties": {"a": node}}, "/properties/a"
            yield {"allOf": [{"$ref": "#/x-own/y"}], "x-own": {"y": node}}, "/x-own/y"


def _draft(source: Random) -> str:
    named = source.choice(DRAFTS)
    if source.random() < 0.2:
        named = named.replace("http:", "https:")
    return named.rstrip("#") + source.choice(("", "#", "#/definitions"))


def _set_any(source: Random, root: dict[str, Any]) -> None:
    _node(source, root)[source.choice(_KNOWN)] = deepcopy(source.choice(VALUES))


def _replace(source: Random, root: dict[str, Any]) -> None:
    node = _node(source, root)
    if node:
        node[source.choice(sorted(node))] = deepcopy(source.choice(VALUES))


def _remove(source: Random, root: dict[str, Any]) -> None:
    node = _node(source, root)
    if node:
        del node[source.choice(sorted(node))]


def _move(source: Random, root: dict[str, Any]) -> None:
    """Copy some value to a keyword elsewhere."""
    value = deepcopy(source.choice([value for _, value in _values(root)]))
    _node(source, root)[source.choice(_KNOWN)] = value


def _refer(source: Random, root: dict[str, Any]) -> None:
    keyword = source.choice(("$ref", "$ref", "$ref", "$dynamicRef", "$recursiveRef"))
    _node(source, root)[keyword] = _reference(source, root)


def _refer_outside(source: Random, root: dict[str, Any]) -> None:
    """Refer to a part of the schema that stands where no keyword expects one."""
    keyword = source.choice(("x-own", "default", "examples", "const", "components", "enum", "definitions"))
    part: Any = source.choice(({"items": [{"type": "null"}]}, *VALUES, random_schema(source)))
    wrapped, suffix = source.choice((({"y": part}, "/y"), ([part], "/0"), ({"a/b": {"~": part}}, "/a~1b/~0")))
    root[keyword] = deepcopy(wrapped)
    _node(source, root)["$ref"] = f"#/{keyword}{suffix}"


def _identify(source: Random, root: dict[str, Any]) -> None:
    node = _node(source, root)
    keyword = source.choice(("$id", "$id", "id", "$anchor", "$dynamicAnchor"))
    names = ("n", "m", "meta") if "nchor" in keyword else (*NAMES, *NAMES, *NAMES_OF_NOTHING)
    node[keyword] = source.choice(names)
    if source.random() < 0.1:
        node["$schema"] = _draft(source)


_MUTATIONS: Final = (_set_any, _replace, _remove, _move, _refer, _refer, _refer_outside, _identify)


def _reference(source: Random, root: dict[str, Any]) -> str:
    if source.random() < 0.3:
        return source.choice(REFERENCES)
    parts = walk(root) if source.random() < 0.7 else _values(root)
    pointer = source.choice([pointer for pointer, _ in parts])
    if source.random() < 0.3:
        pointer = quote(pointer, safe="/~")
    if source.random() < 0.1:
        pointer = "".join(
            f"%{ord(letter):02x}" if letter.isascii() and letter.isalpha() else letter for letter in pointer
        )
    return source.choice(("#", "#", "#", "", "n#", "http://e.test/n#")) + pointer


def _node(source: Random, root: dict[str, Any]) -> dict[str, Any]:
    """Some object of the schema, mostly a subschema."""
    if source.random() < 0.7:
        return source.choice([node for _, node in walk(root) if isinstance(node, dict)])
    found: dict[str, Any] = source.choice([value for _, value in _values(root) if isinstance(value, dict)])
    return found


def _values(root: Any, pointer: str = "") -> Iterator[tuple[str, Any]]:
    """All values inside of the schema and itself, with their JSON Pointers."""
    yield pointer, root
    members: Any = ()
    if isinstance(root, dict):
        members = root.items()
    elif isinstance(root, list):
        members = enumerate(root)
    for key, member in members:
        yield from _values(member, f"{pointer}/{escaped(str(key))}")
