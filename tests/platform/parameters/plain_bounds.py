"""Values of plain parameter types, at their bounds and one step outside."""

import math
from typing import Any

from loraplex.platform.parameters.request_object import ObjectOf, kind_of
from loraplex.platform.parameters.responses_request import TEXT_FORMATS
from loraplex.platform.parameters.value_types import (
    MAX_IDENTIFIER,
    AnyText,
    Boolean,
    Choice,
    Identifier,
    Integer,
    Kind,
    ListOf,
    LogitBias,
    Metadata,
    Number,
    Refused,
    Scalars,
    StopStrings,
    Text,
    TokenIds,
)


def inside(kind: Kind) -> list[Any]:
    """Values at the bounds."""
    match kind:
        case Integer(low, high):
            return [low, high]
        case Number(low, high):
            return [low, high, (low + high) / 2]
        case Boolean(only):
            return [True, False] if only is None else [only]
        case Text(max_bytes, min_bytes):
            return ["a" * min_bytes, "a" * max_bytes, "é" * (max_bytes // 2)]
        case Choice(values):
            return list(values)
        case StopStrings(max_items, max_bytes):
            return ["", "a", "a" * max_bytes, ["a"] * max_items, []]
        case TokenIds(max_items):
            return [[0] * max_items, [], [2**31 - 1]]
        case LogitBias(max_items, bias):
            return [{str(i): bias.low for i in range(max_items)}, {"0": bias.high}, {}]
        case Metadata(max_items, _, value):
            return [{f"{i:064}": "a" * value.max_bytes for i in range(max_items)}, {"a": ""}]
        case ObjectOf(model):
            first = {name: inside(kind_of(field))[:1] for name, field in model.model_fields.items()}
            fields = {name: each for name, [*some] in first.items() for each in some}
            return [{}, fields, dict.fromkeys(fields)]
        case ListOf(Kind() as item, low, high):
            return [inside(item)[:1] * low, inside(item)[:1] * high]
        case Scalars(max_items, max_bytes, largest):
            long = "é" * (max_bytes // 2)
            mixed = {"a": long, "b": "", "c": largest, "d": -largest, "e": 0.5, "f": True}
            return [{}, mixed, {"a": None}, {f"a{index}": 0 for index in range(max_items)}]
        case Refused(_, harmless):
            return list(harmless)
        case Identifier():
            return ["a", "a" * MAX_IDENTIFIER, "_-Z9"]
        case AnyText():
            return ["", "a"]
        case each if each is TEXT_FORMATS:
            named = {"type": "json_schema", "name": "n" * MAX_IDENTIFIER, "schema": {}}
            return [named, {"type": "text"}, {"type": "json_object"}]
    raise AssertionError(f"no bounds for {kind}")


def outside(kind: Kind) -> list[Any]:
    """Values one step outside, and values of other types."""
    match kind:
        case Integer(low, high):
            return [low - 1, high + 1, float(low), "1", True, [low]]
        case Number(low, high):
            beyond = [math.nextafter(low, -math.inf), math.nextafter(high, math.inf), math.inf, math.nan]
            return [*beyond, 10**400, "1", True]
        case Boolean(only):
            return [0, 1, "true", *([] if only is None else [not only])]
        case Text(max_bytes, min_bytes):
            return [
                "a" * (max_bytes + 1),
                "é" * (max_bytes // 2 + 1),
                1,
                ["a"],
                *(["a" * (min_bytes - 1)] if min_bytes else []),
            ]
        case Choice():
            return ["", "other", 1, []]
        case StopStrings(max_items, max_bytes):
            return [[""], "a" * (max_bytes + 1), ["a"] * (max_items + 1), [1], {"a": 1}]
        case TokenIds(max_items):
            return [[0] * (max_items + 1), [-1], [2**31], [True], [1.0], "1"]
        case LogitBias(max_items, bias):
            return [
                {str(i): 0 for i in range(max_items + 1)},
                {"-1": 0},
                {"x": 0},
                {"0": bias.high + 0.1},
                {"²": 0},
                [],
            ]
        case Metadata(max_items, key, value):
            many = {str(i): "" for i in range(max_items + 1)}
            return [
                many,
                {"a" * (key.max_bytes + 1): ""},
                {"a": "a" * (value.max_bytes + 1)},
                {"": ""},
                {"a": 1},
                [],
            ]
        case ObjectOf(model):
            return [{"other": True}, {next(iter(model.model_fields)): 1}, []]
        case ListOf(Kind() as item, low, high):
            wrong = [[each] for each in outside(item)]
            short = [inside(item)[:1] * (low - 1)] if low else []
            return [*short, inside(item)[:1] * (high + 1), {}, 1, *wrong]
        case Scalars(max_items, max_bytes, largest):
            values: list[Any] = ["a" * (max_bytes + 1), largest + 1, -largest - 1, 10**400, math.nan, [], {}]
            names = {f"a{index}": 0 for index in range(max_items + 1)}
            return [names, [], 1, "a", *({"a": each} for each in values)]
        case Refused():
            return [{"type": "json_object"}, [{}], "auto", True, 2]
        case Identifier():
            return ["", "a" * (MAX_IDENTIFIER + 1), "a b", "é", "a.b", "a\n", 1]
        case AnyText():
            return [1, []]
    raise AssertionError(f"no bounds for {kind}")
