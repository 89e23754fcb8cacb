"""Values of the questions of `/v1/decisions`, at their bounds and one step outside, and of the parts that its input alone has."""

from typing import Any

from loraplex.platform.parameters.decision_request import (
    MAX_JSON_BYTES,
    MAX_JSON_DEPTH,
    MAX_JSON_VALUES,
    MAX_LEVELS,
    MAX_OPTIONS,
    MAX_QUESTIONS,
    ScoreQuestion,
)
from loraplex.platform.parameters.responses_tools import OneOf
from loraplex.platform.parameters.value_types import Kind, ListOf

PREDICATE: dict[str, Any] = {"type": "predicate", "instructions": "a"}
CHOICE: dict[str, Any] = {
    "type": "choice",
    "instructions": "a",
    "choices": [{"value": "true"}, {"value": True, "description": ""}],
}
SCORE: dict[str, Any] = {"type": "score", "instructions": "a", "levels": [{"label": "a"}, {"label": "a"}]}


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


def options(count: int) -> list[Any]:
    return [{"value": str(number)} for number in range(count)]


def data(value: object) -> list[Any]:
    """An input that is data."""
    return [
        {
            "role": "user",
            "content": [{"type": "input_json", "data": value}, {"type": "input_text", "text": "a"}],
        }
    ]


WRONG_VALUES: list[Any] = [1, "", "a" * 1025, []]
DATA_INSIDE: list[Any] = [
    data(each)
    for each in (
        {},
        [],
        [{"a": None}, {}],
        nested(MAX_JSON_DEPTH),
        {"a": [0] * (MAX_JSON_VALUES - 2)},
        {"a": "b" * (MAX_JSON_BYTES - 8)},
    )
]
DATA_OUTSIDE: list[Any] = [
    data(each)
    for each in (
        "a",
        1,
        [1],
        nested(MAX_JSON_DEPTH + 1),
        {"a": [0] * (MAX_JSON_VALUES - 1)},
        {"a": "b" * (MAX_JSON_BYTES - 7)},
    )
]


def knows(kind: Kind) -> bool:
    return (
        isinstance(kind, ListOf)
        and isinstance(kind.item, OneOf)
        and ScoreQuestion in kind.item.models.values()
    )


def inside() -> list[Any]:
    """Values at the bounds."""
    return [
        [PREDICATE] * MAX_QUESTIONS,
        [PREDICATE | {"name": "n" * 256, "model": "m"}, CHOICE, SCORE],
        [
            PREDICATE
            | {"instructions": [{"type": "input_text", "text": "a"}, {"type": "input_json", "data": {}}]}
        ],
        [CHOICE | {"choices": options(MAX_OPTIONS)}],
        [SCORE | {"levels": [{"label": "a" * 1024, "description": "a" * 4096}] * MAX_LEVELS}],
    ]


def outside() -> list[Any]:
    """Values one step outside."""
    questions: list[Any] = [
        1,
        {},
        {"type": "open", "instructions": "a"},
        {"type": "predicate"},
        PREDICATE | {"instructions": 1},
        PREDICATE | {"instructions": [{"type": "input_image", "image_url": "data:,"}]},
        PREDICATE | {"name": "n" * 257},
        PREDICATE | {"choices": options(2)},
        CHOICE | {"choices": options(1)},
        CHOICE | {"choices": options(MAX_OPTIONS + 1)},
        CHOICE | {"choices": [{"value": "a"}, {"value": "a", "description": "b"}]},
        *(CHOICE | {"choices": [{"value": each}, {"value": "b"}]} for each in WRONG_VALUES),
        SCORE | {"levels": [{"label": "a"}]},
        SCORE | {"levels": [{"label": "a"}] * (MAX_LEVELS + 1)},
        SCORE | {"levels": [{"label": ""}, {"label": "a"}]},
    ]
    return [[], 1, {}, [PREDICATE] * (MAX_QUESTIONS + 1), *([each] for each in questions)]
