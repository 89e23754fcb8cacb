"""Forced close: from any state a path to the document's end is found, and following it ends in a whole document."""

import json
import random
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import pytest

from loraplex.grammar.backends import forced_close
from loraplex.grammar.backends.replayed_mask import AnswerMask
from loraplex.grammar.spec import Backend
from loraplex.grammar.tree import (
    Alternation,
    Concatenation,
    FreeText,
    JsonValue,
    Literal,
    Node,
    Pattern,
    Separated,
    SpecialToken,
    Triggered,
)

if TYPE_CHECKING:
    from tests.grammar.conftest import Backends

BOTH = pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object"},
    closed(name=closed(first={"type": "string"}, last={"type": "string"}), age={"type": "integer"}),
    closed(kind={"enum": ["circle", "square", 3, None, True]}, exact={"const": {"a": [1, "b"]}}),
    closed(
        low={"type": "integer", "minimum": 1000, "maximum": 1010},
        x={"type": "number", "exclusiveMinimum": 0.5},
    ),
    closed(
        code={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
        mail={"type": "string", "pattern": "^[a-z]+@[a-z]+\\.com$"},
    ),
    closed(list={"type": "array", "items": closed(id={"type": "integer"}), "minItems": 3, "maxItems": 9}),
    closed(any={}, either={"anyOf": [{"type": "string"}, closed(deep={"type": "boolean"})]}),
    closed(when={"type": "string", "format": "date-time"}, id={"type": "string", "format": "uuid"}),
    {
        "type": "array",
        "prefixItems": [{"type": "string"}, {"type": "null"}],
        "items": {"type": "integer"},
        "minItems": 4,
    },
    {
        "$defs": {
            "node": closed(
                value={"type": "integer"}, next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
            )
        },
        "$ref": "#/$defs/node",
    },
]
LLGUIDANCE_ALONE: list[dict[str, Any]] = [
    {"type": "string", "minLength": 12, "maxLength": 14},
    closed(
        step={"type": "integer", "multipleOf": 7, "minimum": 100},
        mail={"type": "string", "format": "email"},
        link={"type": "string", "format": "uri"},
    ),
]


def walk_to_the_end(backends: "Backends", mask: AnswerMask, chance: random.Random, budget: int) -> str:
    """Random tokens as long as the way to the end stays within the budget, then that way."""
    way = mask.closing_tokens(budget)
    assert way is not None
    tokens: list[int] = []
    favourites = {backends.tokens(letter)[0] for letter in '"{}[],:-.\\ 01aetn'}
    while not mask.is_final() and len(tokens) < budget:
        allowed = sorted(backends.allowed(mask) - backends.vocabulary.end_token_ids)
        likely = [token_id for token_id in allowed if token_id in favourites]
        token_id = chance.choice(likely if likely and chance.random() < 0.7 else allowed)
        assert mask.accept(token_id)
        further = mask.closing_tokens(budget - len(tokens) - 1)
        if further is None:
            mask.rollback(1)
            break
        tokens.append(token_id)
        way = further
    else:
        way = [] if mask.is_final() else way
    assert len(tokens) + len(way) <= budget
    assert all(map(mask.accept, way)) and mask.is_complete()
    text: str = backends.vocabulary.tokenizer.decode(tokens + list(way))
    return text


def check_walks(backends: "Backends", backend: Backend, schema: dict[str, Any], seeds: range) -> None:
    for seed in seeds:
        mask = backends.mask(backend, JsonValue(schema), close=True)
        shortest = mask.closing_tokens(1_000)
        assert shortest is not None
        chance = random.Random(seed)
        budget = len(shortest) + chance.randrange(40)
        text = walk_to_the_end(backends, mask, chance, budget)
        assert jsonschema_rs.is_valid(schema, json.loads(text)), text


@BOTH
@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_walk_that_keeps_a_way_ends_in_a_valid_document(
    backends: "Backends", backend: Backend, schema: dict[str, Any]
) -> None:
    check_walks(backends, backend, schema, range(6))


@pytest.mark.parametrize("schema", LLGUIDANCE_ALONE)
def test_the_same_for_schemas_of_one_backend(backends: "Backends", schema: dict[str, Any]) -> None:
    check_walks(backends, "llguidance", schema, range(6))


def call(name: str) -> Node:
    arguments = JsonValue(closed(city={"type": "string"}, days={"type": "integer"}))
    return Concatenation(
        (Literal(f'<tool_call>\n{{"name": "{name}", "arguments": '), arguments, Literal("}\n</tool_call>"))
    )


TREES: list[tuple[Node, str]] = [
    (Separated(Alternation((call("a"), call("b"))), "\n"), '<tool_call>\n{"name": "a", "arg'),
    (
        Triggered("<tool_call>", Separated(call("weather"), "\n"), most=1, ends=True),
        'text <tool_call>\n{"name": "weather", "arguments": {"city": "Pa',
    ),
    (
        Concatenation(
            (SpecialToken("[TOOL_CALLS]"), Literal("["), JsonValue({"type": "object"}), Literal("]"))
        ),
        '[TOOL_CALLS][{"a": ["b',
    ),
    (Pattern("[a-z]+( [a-z]+){2,}\\."), "the quick"),
    (Pattern("(ab|cd){5}"), "abc"),
    (FreeText(), "any text"),
]


@BOTH
@pytest.mark.parametrize(("tree", "begun"), TREES)
def test_other_grammars_close_too(backends: "Backends", backend: Backend, tree: Node, begun: str) -> None:
    mask = backends.mask(backend, tree, close=True)
    tokens = backends.tokens(begun)
    for count in range(len(tokens) + 1):
        way = mask.closing_tokens(120)
        assert way is not None
        walker = mask.fork()
        assert all(map(walker.accept, way)) and walker.is_complete()
        if count < len(tokens):
            assert mask.accept(tokens[count])


@BOTH
def test_inside_a_character_of_several_bytes(backends: "Backends", backend: Backend) -> None:
    mask = backends.mask(backend, JsonValue({"type": "string"}), close=True)
    for token_id in backends.tokens('"€')[:-1]:
        assert mask.accept(token_id)
    way = mask.closing_tokens(4)
    assert way is not None and 2 <= len(way) <= 3


@BOTH
def test_none_when_the_tokens_are_too_few(backends: "Backends", backend: Backend) -> None:
    mask = backends.mask(backend, JsonValue(SCHEMAS[1]), close=True)
    way = mask.closing_tokens(1_000)
    assert way is not None
    assert mask.closing_tokens(len(way)) == way
    assert mask.closing_tokens(len(way) - 1) is None
    assert mask.closing_tokens(0) is None


@BOTH
def test_a_whole_document_needs_no_token(backends: "Backends", backend: Backend) -> None:
    mask = backends.mask(backend, JsonValue({"type": "integer"}), close=True)
    assert mask.accept(backends.tokens("7")[0])
    assert mask.closing_tokens(0) == []


def test_none_when_there_is_no_end(backends: "Backends") -> None:
    endless = {"$defs": {"n": closed(n={"$ref": "#/$defs/n"})}, "$ref": "#/$defs/n"}
    mask = backends.mask("xgrammar", JsonValue(endless), close=True)
    assert mask.closing_tokens(400) is None


@BOTH
def test_the_way_is_spelled_in_whole_tokens(backends: "Backends", backend: Backend) -> None:
    mask = backends.mask(backend, JsonValue(closed(name=closed(city={"type": "string"}))), close=True)
    way = mask.closing_tokens(100)
    assert way is not None
    text = backends.vocabulary.tokenizer.decode(way)
    assert len(way) <= len(backends.tokens(text)) < len(text)


@BOTH
def test_an_expensive_search_is_stopped(
    backends: "Backends", backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = backends.mask(backend, JsonValue(SCHEMAS[1]), close=True)
    assert mask.closing_tokens(1_000) is not None
    monkeypatch.setattr(forced_close, "MAX_SECONDS", 0.0)
    assert mask.closing_tokens(1_000) is None
