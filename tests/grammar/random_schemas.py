"""Random schemas: every keyword beside every other, merged, referred to and nested, most of them nonsense."""

from random import Random
from typing import Any

from loraplex.grammar.json_schema.formats import FORMATS

NAMES = ("a", "b", "foo", "a/b", "x~y", "")
PATTERNS = (
    "^a",
    "b$",
    "^f.o$",
    "[0-9]{2}",
    "^[^a-c]+$",
    "^(a|b)*$",
    "x|^y$",
    "^$",
    "a.c",
    "^\\S+$",
    "^\\W{1,3}$",
)
BOUNDS = (0, 1, -1, 5, 10, -10, 1.5, -0.5, 99, 100, 0.1, 1e-3, 12345.678, 2**40, 1e15)
STEPS = (1, 2, 3, 0.5, 0.1, 0.01, 7, 1.5, 0.0001, 10, 1e-8, 0.3)
VALUES = (1, 2, "a", "b", None, True, 1.5, [1], {"a": 1}, {"b": 2}, 'foo\n"', 0, -1, 100)
TYPES = ("object", "array", "string", "number", "integer", ["string", "null"], ["object", "integer"], None)
LEAVES: tuple[Any, ...] = (True, False, {}, {"type": "integer"}, {"type": "string"}, {"const": [1, "a"]})


def random_schema(source: Random) -> dict[str, Any]:
    """One schema with two definitions, which it may refer to."""
    found = _schema(source, 3)
    root = found if isinstance(found, dict) else {"anyOf": [found]}
    return {**root, "$defs": {"A": _schema(source, 2), "B": _schema(source, 2)}}


def _schema(source: Random, depth: int) -> Any:
    if depth <= 0 or source.random() < 0.1:
        return source.choice(LEAVES)
    made: dict[str, Any] = {}
    kind = source.choice(TYPES)
    if source.random() < 0.75:
        if kind is not None:
            made["type"] = kind
        for fill in _fillers(source, kind):
            fill(source, made, depth)
    if not made or source.random() < 0.3:
        for _ in range(source.randint(1, 2)):
            _apply(source, made, depth)
    items = list(made.items())
    if source.random() < 0.3:
        source.shuffle(items)
    return dict(items)


def _fillers(source: Random, kind: Any) -> list[Any]:
    own = {"object": _object, "array": _array, "string": _string, "number": _number, "integer": _number}
    return [own[kind]] if isinstance(kind, str) else source.sample([_object, _array, _string, _number], 2)


def _object(source: Random, made: dict[str, Any], depth: int) -> None:
    if source.random() < 0.7:
        names = source.sample(NAMES, source.randint(0, 3))
        made["properties"] = {name: _schema(source, depth - 1) for name in names}
    if source.random() < 0.4:
        made["required"] = source.sample(NAMES, source.randint(0, 2))
    if source.random() < 0.4:
        made["additionalProperties"] = _schema(source, depth - 1) if source.random() < 0.5 else False
    if source.random() < 0.2:
        patterns = source.sample(PATTERNS, source.randint(1, 2))
        made["patternProperties"] = {pattern: _schema(source, depth - 1) for pattern in patterns}
    for keyword in ("minProperties", "maxProperties"):
        if source.random() < 0.15:
            made[keyword] = source.randint(0, 3)
    if source.random() < 0.05:
        made["propertyNames"] = source.choice([{"pattern": "^a"}, True, False, {"maxLength": 3}])
    if source.random() < 0.05:
        made["unevaluatedProperties"] = source.choice([False, {"type": "integer"}])


def _array(source: Random, made: dict[str, Any], depth: int) -> None:
    if source.random() < 0.7:
        made["items"] = _schema(source, depth - 1)
    if source.random() < 0.3:
        made["prefixItems"] = [_schema(source, depth - 1) for _ in range(source.randint(1, 3))]
    if source.random() < 0.3:
        made["minItems"] = source.choice([0, 1, 2, 2.0])
    if source.random() < 0.3:
        made["maxItems"] = source.randint(0, 3)
    if source.random() < 0.1:
        made["uniqueItems"] = source.random() < 0.5
    if source.random() < 0.1:
        made["contains"] = source.choice([True, {"type": "integer"}])


def _string(source: Random, made: dict[str, Any], depth: int) -> None:
    if source.random() < 0.4:
        made["minLength"] = source.randint(0, 3)
    if source.random() < 0.4:
        made["maxLength"] = source.randint(0, 5)
    if source.random() < 0.4:
        made["pattern"] = source.choice(PATTERNS)
    if source.random() < 0.3:
        made["format"] = source.choice(sorted(FORMATS))


def _number(source: Random, made: dict[str, Any], depth: int) -> None:
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if source.random() < 0.3:
            made[keyword] = source.choice(BOUNDS)
    if source.random() < 0.3:
        made["multipleOf"] = source.choice(STEPS)


def _apply(source: Random, made: dict[str, Any], depth: int) -> None:
    keyword = source.choice(("allOf", "anyOf", "oneOf", "$ref", "$ref", "enum", "not", "if"))
    if keyword == "$ref":
        made["$ref"] = source.choice(("#/$defs/A", "#/$defs/B", "#"))
    elif keyword == "enum":
        made["enum"] = source.sample(VALUES, source.randint(1, 4))
    elif keyword == "not":
        made["not"] = source.choice(
            [{"type": "string"}, {}, {"type": ["number", "null"]}, {"required": ["a"]}]
        )
    elif keyword == "if":
        made.update({name: _schema(source, depth - 1) for name in ("if", "then", "else")})
    else:
        made[keyword] = [_schema(source, depth - 1) for _ in range(source.randint(1, 3))]
