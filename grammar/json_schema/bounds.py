"""Tests the size limits of a schema before any other step.

Invariant: nothing here recurses, so no schema exhausts the stack; a schema that passes can be walked recursively.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from loraplex.grammar.constraints import JsonSchemaValue, SchemaLimits
from loraplex.grammar.errors import GrammarInvalid, GrammarTooLarge
from loraplex.grammar.json_schema.walk import escaped, walk

COUNTS: Final = (
    "maxContains",
    "maxItems",
    "maxLength",
    "maxProperties",
    "minContains",
    "minItems",
    "minLength",
    "minProperties",
)
LENGTHS: Final = ("maxLength", "minLength")
_MAX_BITS: Final = 8_192
"""Python converts no number of more than 4,300 digits to text."""
_BRACES: Final = re.compile(r"\{(\d+)(?:,(\d*))?\}")


def check_bounds(schema: JsonSchemaValue, *, limits: SchemaLimits, param: str) -> None:
    """Raises `GrammarTooLarge` with the exceeded number, `GrammarInvalid` for values that JSON cannot express."""
    if not isinstance(schema, dict | bool):
        raise GrammarInvalid(f"{param} is neither an object nor a boolean", param=param, pointer="")
    _check_shape(schema, limits, param)
    size = len(json.dumps(schema, ensure_ascii=False, separators=(",", ":")).encode())
    if size > limits.max_bytes:
        raise GrammarTooLarge(
            f"{param} has {size} bytes, at most {limits.max_bytes} are allowed", param=param, pointer=""
        )
    check_keywords(schema, limits=limits, param=param)


def check_keywords(schema: JsonSchemaValue, *, limits: SchemaLimits, param: str, pointer: str = "") -> None:
    """Test the counts, enums and patterns of the schema at `pointer`. Raises `GrammarTooLarge`."""
    for place, node in walk(schema, pointer):
        if isinstance(node, dict):
            _check_keywords(node, place, limits, param)


def check_together(schemas: Iterable[tuple[JsonSchemaValue, str]], *, limits: SchemaLimits) -> None:
    """Test the limits that all schemas of a request share, each with its `param`. Raises `GrammarTooLarge`."""
    nodes, patterns = 0, 0
    for schema, param in schemas:
        for _, node in walk(schema):
            nodes += 1
            patterns += sum(map(_size, _patterns(node))) if isinstance(node, dict) else 0
            if nodes > limits.max_nodes_together:
                allowed = f"at most {limits.max_nodes_together} are allowed in one request"
                raise GrammarTooLarge(f"{param}: too many subschemas, {allowed}", param=param)
            if patterns > limits.max_patterns_bytes:
                allowed = f"at most {limits.max_patterns_bytes} bytes are allowed in one request"
                raise GrammarTooLarge(f"{param}: too many patterns, {allowed}", param=param)


def _size(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def _patterns(node: dict[str, Any]) -> Iterator[str]:
    if isinstance(pattern := node.get("pattern"), str):
        yield pattern
    if isinstance(patterns := node.get("patternProperties"), dict):
        yield from patterns


def _check_shape(schema: JsonSchemaValue, limits: SchemaLimits, param: str) -> None:
    stack: list[tuple[Any, str, int]] = [(schema, "", 1)]
    nodes = 0
    while stack:
        value, pointer, depth = stack.pop()
        nodes += 1
        if depth > limits.max_depth:
            raise GrammarTooLarge(
                f"{param} is nested deeper than {limits.max_depth} levels", param=param, pointer=pointer
            )
        if nodes > limits.max_nodes + limits.max_enum:
            raise _too_many_nodes(limits, param)
        if isinstance(value, dict):
            for key, member in value.items():
                _check_text(key, pointer, param)
                stack.append((member, f"{pointer}/{escaped(key)}", depth + 1))
        elif isinstance(value, list):
            stack.extend((member, f"{pointer}/{index}", depth + 1) for index, member in enumerate(value))
        else:
            _check_scalar(value, pointer, param)
    if nodes > limits.max_nodes + _enum_values(schema):
        raise _too_many_nodes(limits, param)


def _too_many_nodes(limits: SchemaLimits, param: str) -> GrammarTooLarge:
    return GrammarTooLarge(
        f"{param} has more than {limits.max_nodes} values beside those of enum", param=param, pointer=""
    )


def _enum_values(schema: JsonSchemaValue) -> int:
    """Count the scalars in enums, which have a limit of their own."""
    lists = (node.get("enum") for _, node in walk(schema) if isinstance(node, dict))
    return sum(
        1
        for values in lists
        if isinstance(values, list)
        for value in values
        if not isinstance(value, dict | list)
    )


def _check_scalar(value: object, pointer: str, param: str) -> None:
    if isinstance(value, str):
        _check_text(value, pointer, param)
    elif isinstance(value, float) and not math.isfinite(value):
        raise GrammarInvalid(f"{param} holds a number that is not finite", param=param, pointer=pointer)
    elif isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise GrammarTooLarge(
            f"{param} holds a number of more than {_MAX_BITS} bits", param=param, pointer=pointer
        )
    elif value is not None and not isinstance(value, bool | int | float):
        raise GrammarInvalid(f"{param} holds a value that is not JSON", param=param, pointer=pointer)


def _check_text(text: object, pointer: str, param: str) -> None:
    if not isinstance(text, str):
        raise GrammarInvalid(f"{param} has a key that is not a string", param=param, pointer=pointer)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise GrammarInvalid(
            f"{param} holds half of a surrogate pair", param=param, pointer=pointer
        ) from None


def _check_keywords(node: dict[str, Any], pointer: str, limits: SchemaLimits, param: str) -> None:
    for keyword in COUNTS:
        value = node.get(keyword)
        limit = limits.max_length if keyword in LENGTHS else limits.max_repeat
        if isinstance(value, int | float) and value > limit:
            raise _too_large(param, pointer, keyword, f"is {value}", limit)
    values = node.get("enum")
    if isinstance(values, list) and len(values) > limits.max_enum:
        raise _too_large(param, pointer, "enum", f"has {len(values)} values", limits.max_enum)
    if isinstance(pattern := node.get("pattern"), str):
        _check_pattern(pattern, f"{pointer}/pattern", limits, param)
    if isinstance(patterns := node.get("patternProperties"), dict):
        for pattern in patterns:
            _check_pattern(pattern, f"{pointer}/patternProperties/{escaped(pattern)}", limits, param)


def _check_pattern(pattern: str, pointer: str, limits: SchemaLimits, param: str) -> None:
    size = len(pattern.encode())
    if size > limits.max_pattern_bytes:
        raise GrammarTooLarge(
            f"{param}: a pattern of {size} bytes, at most {limits.max_pattern_bytes} are allowed",
            param=param,
            pointer=pointer,
        )
    for bounds in _BRACES.finditer(pattern):
        for bound in bounds.groups():
            # Test the length first: converting a number of thousands of digits is slow.
            if bound and (len(bound) > 9 or int(bound) > limits.max_repeat):
                raise GrammarTooLarge(
                    f"{param}: a pattern repeats more than {limits.max_repeat} times",
                    param=param,
                    pointer=pointer,
                )


def _too_large(param: str, pointer: str, keyword: str, found: str, allowed: int) -> GrammarTooLarge:
    return GrammarTooLarge(
        f"{param}: {keyword} {found}, at most {allowed} is allowed",
        param=param,
        pointer=f"{pointer}/{keyword}",
    )
